"""Folders that only this user can write, and the entries of the user's cache, which are believed only as they were written."""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from cepo.errors import ForeignFileError
from cepo.files.safe_files import irregular_file, private_folder
from cepo.files.trees import Tree, is_dict

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 600.0
"""How long a process waits for another one that makes the same entry, which may have been stopped."""
UNUSED_DAYS = 60
"""Entries that were not used for so long are removed when another one is made."""
_SEAL = "seal.json"

Seal = dict[str, list[object]]
"""For each file of an entry: its size, the times in ns of the last changes of its content and its entry, its digest."""


def own_folder(place: Path) -> Path:
    """Returns `place`, which is created if it is missing.

    Returns a temporary folder of this process instead, after a warning, if `place` cannot be used or another user could
    write in it or put another folder in its place.
    """
    try:
        fault = _fault_around(place)  # nothing is created in another user's folder
        if not fault:
            private_folder(place)
            fault = _fault_around(place)
    except ForeignFileError as error:
        fault = f"it {error.fault}"
    except OSError as error:
        fault = f"{error.strerror or error}"
    if not fault:
        return place
    _warn(place, fault)
    replacement = _temporary_folder() / place.name
    replacement.mkdir(exist_ok=True)
    return replacement


def _fault_around(place: Path) -> str:
    """Returns why others could put another folder in the place of one; empty if they cannot."""
    user = os.getuid()
    absolute = Path(os.path.abspath(place))
    for parent in (*absolute.parents, *absolute.resolve().parents):
        try:
            status = parent.lstat()
        except FileNotFoundError:  # it is created for this user
            continue
        if status.st_uid not in (0, user):
            return f"{parent} belongs to the user {status.st_uid}"
        is_open = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH
        if is_open and not status.st_mode & stat.S_ISVTX:
            return f"everyone may write in {parent}"
    return ""


@cache
def _warn(place: Path, fault: str) -> None:
    """Warns, once in a process."""
    logger.warning(
        "the folder %s is not used, because %s: what belongs there is kept for this run alone, and the next start takes as "
        "long. XDG_CACHE_HOME names another folder for caches, XDG_STATE_HOME one for what is noted of runs",
        place,
        fault,
    )


@cache
def _temporary_folder() -> Path:
    """Returns a folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="cepo-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cache_folder(kind: str) -> Path:
    """Returns the folder of all entries of a kind: `cepo/<kind>` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if home.startswith("~"):  # this user has no home
        home = str(_temporary_folder())
    return own_folder(Path(home) / "cepo" / kind)


def has_entry(kind: str, key: str) -> bool:
    return (cache_folder(kind) / key / _SEAL).is_file()


@contextmanager
def cached(kind: str, key: str) -> Generator[Path]:
    """Yields the folder of an entry: empty, or with exactly what an earlier process wrote there.

    The caller fills an empty one. No other process changes it meanwhile. A file that is not as it was written, and an
    entry that a killed process left, count for none. If another process has it for longer than `LONGEST_WAIT_SECONDS`,
    the entry is a temporary one.
    """
    parent = cache_folder(kind)
    lock = parent / f"{key}.lock"
    with ExitStack() as stack:
        try:
            _require_own(lock)
            _require_own(parent / key)
            stack.enter_context(_locked(lock))
        # filelock's `Timeout` is an OSError, and so is that of a file system without locks
        except (OSError, ForeignFileError) as error:
            logger.warning("%s is not used: %s. This run does the same work itself", lock, error)
            parent = Path(tempfile.mkdtemp(dir=_temporary_folder()))
        entry = parent / key
        _remove_unless(entry, lambda status: stat.S_ISDIR(status.st_mode))
        is_complete = _is_as_sealed(entry)
        if not is_complete:
            shutil.rmtree(entry, ignore_errors=True)
            _remove_unused(parent)
            entry.mkdir(mode=0o700, exist_ok=True)
        if is_complete:
            yield entry
            os.utime(entry)
            return
        try:
            yield entry
            _seal(entry)
        except BaseException as error:
            shutil.rmtree(entry, ignore_errors=True)  # half of an entry would keep a full disk full
            if _is_of_full_disk(error) or _is_of_full_disk(error.__cause__):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(entry)) from error
            raise


def _is_of_full_disk(error: BaseException | None) -> bool:
    """Returns whether a write failed for want of space. Such errors name no file; `shutil` lists several in one."""
    if not isinstance(error, OSError):
        return False
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or f"[Errno {errno.ENOSPC}]" in str(error)


def _locked(file: Path) -> Any:
    """Locks a file as soon as no other process has, or raises `OSError`; returns a context that frees it at its end."""
    from filelock import FileLock, Timeout  # which `cepo look` need not have

    # Some releases of filelock truncate the file, which must therefore be no other one's second name.
    _remove_unless(file, lambda status: stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
    lock = FileLock(file, mode=0o600)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for another process that does the same work and has locked %s", file)
        return lock.acquire(timeout=LONGEST_WAIT_SECONDS)


def _require_own(place: Path) -> None:
    """Raises `ForeignFileError` for what another user owns: it is neither believed nor removed."""
    with suppress(FileNotFoundError):
        owner = place.lstat().st_uid
        if owner != os.getuid():
            raise ForeignFileError(place, f"belongs to the user {owner}")


def _remove_unless(place: Path, is_right: Callable[[os.stat_result], bool]) -> None:
    """Removes what is no file or folder of this module's, such as a link, which would lead it elsewhere."""
    with suppress(FileNotFoundError):
        if not is_right(place.lstat()):
            logger.warning("%s is a link or of another kind than this program writes; it is removed", place)
            place.unlink()


def _files(entry: Path) -> list[Path]:
    return [file for file in entry.rglob("*") if file.is_file() and file.name != _SEAL]


def _seal(entry: Path) -> None:
    """Notes all files of an entry with their digests."""
    seal: Seal = {}
    for file in _files(entry):
        seal[str(file.relative_to(entry))] = [*_state(file), digest_of_file(file)]
    new = entry / f".{_SEAL}"
    new.write_text(json.dumps(seal), encoding="utf-8")
    new.replace(entry / _SEAL)


def _is_as_sealed(entry: Path) -> bool:
    """Returns whether an entry is complete, and each of its files as it was. Only files with other times are read."""
    irregular = irregular_file(entry)
    if irregular is not None:
        logger.warning("%s is neither a file nor a folder; what is kept there is made anew", irregular)
        return False
    try:
        seal: object = json.loads((entry / _SEAL).read_bytes())
        if not is_dict(seal):
            return False
        for name, noted in cast(Tree, seal).items():
            *state, digest = noted
            if state != _state(entry / name) and digest != digest_of_file(entry / name):
                logger.info("%s is not as it was written, and is made anew", entry / name)
                return False
    except (OSError, ValueError, TypeError):
        return False
    return True


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def digest_of_file(file: Path) -> str:
    with file.open("rb") as opened:
        return digest_of(opened)


def digest_of(file: BinaryIO) -> str:
    """Returns the XXH3 digest of a file's content: SHA-256 would take ten seconds for the images of 100,000 rows."""
    import xxhash

    opened: Any = file
    return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


@cache
def _remove_unused(parent: Path) -> None:
    """Removes this user's entries that were not used for long, once in a process."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for entry in parent.iterdir():
        with suppress(FileNotFoundError):  # another process removes it at the same time
            status = entry.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and status.st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)
