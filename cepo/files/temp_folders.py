"""Creates temporary folders that the next start removes if their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "cepo-"


class OwnFolder:
    """Creates a temporary folder `cepo-<kind>-<process>-...`, which is locked while its process lives.

    As a context manager it removes the folder on exit. Creating one also removes the folders of killed processes.
    """

    def __init__(self, kind: str) -> None:
        remove_left_behind()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-{os.getpid()}-", dir=_parent()))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_behind() -> None:
    """Removes folders of this user's dead processes.

    A folder is kept if its process is running, or if a process that is not visible in this container has locked it.
    """
    for folder in _parent().glob(f"{_PREFIX}*-*-*"):
        _, process, _ = folder.name.rsplit("-", maxsplit=2)
        if not process.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError):  # another start removes it at the same time
            is_own = folder.stat().st_uid == os.getuid()
            if is_own and not Path(f"/proc/{process}").exists():
                descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _parent() -> Path:
    """Returns /tmp if it exists, because paths of sockets must be short."""
    return Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())
