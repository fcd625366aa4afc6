"""Defines the exceptions of this library. Each is also a standard-library type, so callers may catch either."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

_NEAR_STEM = 0.75
"""How near the name of a file without its ending must be: of many files some are always a little alike."""


class CepoError(Exception):
    """All errors that `cepo` raises on purpose derive from this class."""


class ConfigError(CepoError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or in conflict with another one."""


class DataError(CepoError, ValueError):
    """A dataset, a row or an image cannot be used."""


class ForeignFileError(DataError):
    """A file that others may have made is not regular, too large, elsewhere, or not in the stated format."""

    def __init__(self, path: object, fault: str) -> None:
        super().__init__(str(path), fault)  # both, so that the error can be sent between processes
        self.fault = fault

    def __str__(self) -> str:
        return " ".join(self.args)


class RewardError(CepoError, ValueError):
    """A reward function cannot be loaded, or returned something that breaks its contract."""


class CheckpointError(CepoError, ValueError):
    """A checkpoint is missing, incomplete, or does not fit the run that loads it."""


class EngineError(CepoError, RuntimeError):
    """A model or rollout engine failed, or cannot run on this machine."""


class WorkerLostError(EngineError):
    """A worker died or hangs. The run can continue from its last checkpoint with new workers."""


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the known spelling that is nearest to a misspelt name; None if none has a similarity of at least `cutoff`.

    Case, hyphens and underscores do not count: `Save-Freq` is near `save_freq`.
    """
    spellings: dict[str, str] = {}
    for spelling in known:
        spellings.setdefault(_folded(spelling), spelling)
    folded = _folded(name)
    near = difflib.get_close_matches(folded, list(spellings), n=3, cutoff=cutoff)
    if not near:
        return None
    # Of similar names, one whose letters were typed in another order is the likeliest.
    reordered = [candidate for candidate in near if sorted(candidate) == sorted(folded)]
    return spellings[reordered[0] if reordered else near[0]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence fragment with the nearest known spelling; empty if none is near."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f" Did you mean '{nearest}'?"


def near_path(path: str | Path) -> str:
    """Returns a sentence fragment with the path beside a missing one whose name is nearest; empty if none is near."""
    missing = Path(path)
    folder = missing.expanduser().parent
    if not os.access(folder, os.R_OK) or not folder.is_dir():
        return ""
    likeliest_last = sorted(os.listdir(folder), key=lambda name: Path(name).suffix == missing.suffix)
    names = {Path(name).stem: name for name in likeliest_last}
    stem = nearest_name(missing.stem, names, cutoff=_NEAR_STEM)
    return "" if stem is None else f" Did you mean '{missing.with_name(names[stem])}'?"


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def place_in(error: BaseException, files: Iterable[str | Path]) -> str | None:
    """Returns the innermost line of an exception within a user's `files`, as "FILE, line N, in NAME"; None if none."""
    own_files = {str(Path(file).expanduser().resolve()): file for file in files}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own_files]
    return f"{own_files[frames[-1].filename]}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else None


_UNUSABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""The errors of the operating system that say something about a place on the disk, not about our code."""


def unusable_place(error: BaseException) -> str | None:
    """Describes a place on the disk that cannot be written, and how to choose another; None for any other error."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    home = Path("~").expanduser()
    home_is_usable = home.is_dir() and os.access(home, os.W_OK)
    if Path(error.filename).is_relative_to(home) and not home_is_usable:
        return (
            f"{error.filename}: nothing can be written in the home folder {home} ({error.strerror}). Set HOME to a folder in "
            "which you may write; caches, downloads and notes of runs go there"
        )
    if error.errno not in _UNUSABLE:
        return None
    return (
        f"{error.filename}: {error.strerror}. Choose another place: trainer.save_checkpoint_path for the run, "
        "XDG_CACHE_HOME for the caches of cepo, HF_HOME for downloads, TMPDIR for temporary files"
    )
