"""Locks a run's folder, so that two runs never write to it at the same time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from cepo.errors import CheckpointError
from cepo.run_folder.layout import LOCK_FILE, require_own_records

logger = logging.getLogger(__name__)
_HELD = (errno.EACCES, errno.EAGAIN)
_LONGEST_HOLDER = 200


class RunLock:
    """Holds `<run folder>/run.lock` from `acquire` until `release` or until the process ends, even by kill -9.

    It is a POSIX record lock, which child processes do not inherit and which works across machines on network file
    systems. The file's text names the holder. On a file system without locks nothing is held, and a warning says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Creates the folder and acquires its lock; does nothing if this object already holds it.

        Raises `CheckpointError`: another run holds it, or the folder cannot be written; `ForeignFileError`: a link or pipe.
        """
        if self._descriptor is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            require_own_records(self._folder, [LOCK_FILE])
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"the run folder {self._folder} cannot be written ({error}); set trainer.save_checkpoint_path to another"
            ) from error
        text = os.pread(descriptor, _LONGEST_HOLDER, 0).decode("utf-8", errors="replace")
        holder = "".join(filter(str.isprintable, text))
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                os.close(descriptor)
                raise CheckpointError(
                    f"the run folder {self._folder} is in use by {holder or 'another process'}; two runs would overwrite each "
                    "other's checkpoints and records. Wait for that run or end it, or set trainer.experiment_name or "
                    f"trainer.save_checkpoint_path to another. If that run no longer exists, remove {self._path}"
                ) from error
            logger.warning("%s: this file system has no locks (%s); give no other run this folder", self._path, error)
        if holder:
            logger.warning("%s was left by %s, which ended without closing its run", self._path, holder)
        self._descriptor = descriptor
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}")

    def release(self) -> None:
        """Empties the lock file and releases the lock. The file stays, so that no two runs lock different ones."""
        if self._descriptor is not None:
            self._write(self._descriptor, "")
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, descriptor: int, text: str) -> None:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        except OSError as error:  # for example a full disk; the lock is held nevertheless
            logger.warning("%s cannot name this run: %s", self._path, error)
