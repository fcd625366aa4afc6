"""Recognises the configurations that this user's own runs have recorded.

A digest of each recorded configuration is a file in a folder of the user's, outside of every run folder. A stranger can
therefore not make his configuration one of them, and a configuration that was changed is none any more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path

from cepo.files.own_cache import is_own_folder
from cepo.files.safe_files import read_bytes

logger = logging.getLogger(__name__)


def _folder() -> Path:
    """Returns the folder of digests; raises `RuntimeError` if this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "cepo" / "own_records"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remember_own_record(text: str) -> None:
    """Notes the text of a `config.yaml` as that of a run of this user's; warns if his folder cannot be written."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_own_folder(folder):
            raise PermissionError(f"others may write in {folder}, or it belongs to another user")
        note = folder / _digest(text.encode())
        os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
    except (OSError, RuntimeError) as error:
        logger.warning(
            "this run is not noted as yours (%s): cepo evaluate, credit and merge will treat it as a stranger's, and ask for "
            "its model and data",
            error,
        )


def is_own_record(file: Path) -> bool:
    """Returns whether a run of this user's has recorded exactly this file; raises `DataError` if it cannot be read."""
    digest = _digest(read_bytes(file, within=file.parent))
    try:
        note = (_folder() / digest).lstat()
        return is_own_folder(_folder()) and stat.S_ISREG(note.st_mode) and note.st_uid == os.getuid()
    except (OSError, RuntimeError):
        return False
