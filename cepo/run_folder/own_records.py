"""Recognises the configurations that this user's own runs have recorded.

A digest of each recorded configuration is a file in a folder of the user's, outside of every run folder. A stranger can
therefore not make another configuration one of them, and a configuration that was changed is none any more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path

from cepo.errors import ForeignFileError, unusable_place
from cepo.files.safe_files import private_folder, read_bytes

logger = logging.getLogger(__name__)


def _folder() -> Path:
    """Returns the folder of digests; raises `RuntimeError` if this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "cepo" / "own_records"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remember_own_record(text: str) -> None:
    """Notes the text of a `config.yaml` as that of a run of this user's; warns if their folder cannot be written."""
    try:
        folder = private_folder(_folder())
        note = folder / _digest(text.encode())
        os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
    except (OSError, RuntimeError, ForeignFileError) as error:
        logger.warning(
            "this run is not noted as yours (%s): cepo evaluate, credit and merge will treat it as a stranger's, and ask for "
            "its model and data",
            unusable_place(error) or error,
        )


def is_own_record(file: Path) -> bool:
    """Returns whether a run of this user's has recorded exactly this file; raises `DataError` if it cannot be read.

    A folder of notes that another user can write into, of a shared `XDG_STATE_HOME` for example, is not believed.
    """
    digest = _digest(read_bytes(file, within=file.parent))
    try:
        folder = _folder()
        return folder.is_dir() and stat.S_ISREG((private_folder(folder) / digest).lstat().st_mode)
    except (OSError, RuntimeError, ForeignFileError):
        return False
