"""Locks a run folder, so that only one run uses it at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cepo.errors import CheckpointError
from cepo.tracking.run_folder import LOCK_FILE, require_own_records
from cepo.trees import is_dict

logger = logging.getLogger(__name__)

_HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Holds `<run folder>/run.lock` from `acquire` until `release` or until the process ends, even by kill -9.

    It is a POSIX record lock, which child processes do not inherit and which works across machines on network file
    systems. The file's text names the holder, for the error of a refused run. On a file system without locks nothing
    is held, and a warning says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquires the lock; does nothing if this object already holds it.

        Raises:
            CheckpointError: another run holds it, or the file cannot be written.
            ForeignFileError: the file is a link or a pipe.
        """
        if self._descriptor is not None:
            return
        require_own_records(self._folder, [LOCK_FILE])
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"the run folder {self._folder} cannot be written ({error}); set trainer.save_checkpoint_path to another"
            ) from error
        holder = _holder(self._descriptor)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                self._close()
                raise self._refused(holder) from error
            logger.warning("%s: this file system has no locks (%s); give no other run this folder", self._path, error)
        if holder:
            logger.warning("%s was left by %s, which ended without closing its run", self._path, _in_words(holder))
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n")

    def release(self) -> None:
        """Empties the lock file and releases the lock. The file stays, so that no two runs lock different ones."""
        if self._descriptor is not None:
            self._write("")
            self._close()

    def _write(self, text: str) -> None:
        assert self._descriptor is not None, "the file is open"
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode("utf-8"), 0)
        except OSError as error:  # for example a full disk; the lock is held nevertheless
            logger.warning("%s cannot name this run: %s", self._path, error)

    def _close(self) -> None:
        assert self._descriptor is not None, "the file is open"
        os.close(self._descriptor)
        self._descriptor = None

    def _refused(self, holder: dict[str, Any]) -> CheckpointError:
        who = _in_words(holder) if holder else "another process"
        return CheckpointError(
            f"the run folder {self._folder} is in use by {who}; two runs would overwrite each other's checkpoints and "
            "records. Wait for that run or end it, or set trainer.experiment_name or trainer.save_checkpoint_path to "
            f"another. If that run no longer exists, remove {self._path}"
        )


def _in_words(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _holder(descriptor: int) -> dict[str, Any]:
    """Returns the holder recorded in the file, or an empty dict if it is empty or unreadable."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if is_dict(found) else {}
