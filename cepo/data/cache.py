"""Remembers in the user's cache what was found out about data files, so that a later start need not find it out again.

Everything here can be lost or damaged at any time: an entry is a file with a checksum, and one that does not have its
expected form counts as missing. A cache folder that cannot be used costs the memory of the results and never the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cepo.errors import ForeignFileError
from cepo.files.safe_files import open_regular, read_bytes
from cepo.terminal.progress import phase

logger = logging.getLogger(__name__)

MOST_ENTRIES = 10_000
"""The most entries of one kind. Beyond it, those that were not used for the longest time are removed."""
MOST_BYTES = 2_000_000_000
"""The most bytes of the entries of one kind; the same holds."""
LARGEST_ENTRY = 500_000_000
SETTLED_SECONDS = 2.0
"""The age from which a file's times tell whether it has changed: clocks of file systems are that coarse."""
SMALLEST_REMEMBERED = 1_000_000
"""The size in bytes from which a file's digest is remembered; smaller ones are read as fast as an entry."""
_LARGE_FILE = 2_000_000_000
"""The size in bytes from which reading a file takes long enough to be reported."""
_ABANDONED_SECONDS = 3600.0
_FORM = b"cepo data cache 1 "
_DIGESTS = "digests"
_DIGEST = re.compile(rb"[0-9a-f]{64}")

_has_warned = False
_pruned: set[Path] = set()


def cache_folder() -> Path:
    """Returns the folder of all entries: `cepo/data` in `XDG_CACHE_HOME`, by default `~/.cache`. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cepo" / "data"


def usable_folder(kind: str) -> Path | None:
    """Returns the folder of the entries of a kind, which is created; None, after a warning, if it cannot be used."""
    try:
        folder = cache_folder() / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        warn_unusable(error)
        return None
    return folder


def warn_unusable(error: Exception) -> None:
    """Warns, once in a process, that results are not remembered."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "the cache folder cannot be used (%s: %s): results of reading and checking data are not remembered, and the next "
            "start takes as long. XDG_CACHE_HOME names another folder",
            type(error).__name__,
            error,
        )


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """Yields a path beside `path` for a file to write, which replaces `path` at the end, complete and on the disk.

    Several processes may do so at once; the last one wins. After an exception nothing is left.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    os.close(descriptor)
    temporary_file = Path(name)
    try:
        yield temporary_file
        with open(temporary_file, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary_file, path)
    finally:
        temporary_file.unlink(missing_ok=True)


def read_entry(kind: str, key: str) -> bytes | None:
    """Returns the content that was written under `key`, a hexadecimal digest; None without a whole and sound entry."""
    try:
        folder = cache_folder() / kind
        path = folder / key
        if not path.exists():
            return None
    except (OSError, RuntimeError):  # writing an entry reports it
        return None
    try:
        entry = read_bytes(path, within=folder, largest=LARGEST_ENTRY)
    except ForeignFileError as error:
        logger.info("the cache entry %s is not used: it %s", path, error.fault)
        return None
    head, _, content = entry.partition(b"\n")
    if head != _head(kind, key, content):
        logger.info("the cache entry %s is damaged and is not used", path)
        return None
    with suppress(OSError):  # for the order in which entries are removed
        os.utime(path)
    return content


def write_entry(kind: str, key: str, content: bytes) -> None:
    """Remembers `content` under `key`, a hexadecimal digest; warns if that fails. Too large a content is not kept."""
    folder = usable_folder(kind)
    if folder is None or len(content) >= LARGEST_ENTRY:
        return
    try:
        with new_file(folder / key) as temporary_file:
            temporary_file.write_bytes(_head(kind, key, content) + b"\n" + content)
    except OSError as error:
        warn_unusable(error)
        return
    if folder not in _pruned:  # once in a process, because listing thousands of entries takes long
        _pruned.add(folder)
        prune(folder)


def prune(folder: Path, *, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
    """Removes the files of a folder that were not used for the longest time, until both bounds hold.

    Also removes the files that killed processes left unfinished.
    """
    entries: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process removes it at the same time
            status = path.stat(follow_symlinks=False)
            is_unfinished = path.name.startswith(".new-")
            if is_unfinished and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                path.unlink()
            elif not is_unfinished:
                entries.append((status.st_mtime, status.st_size, path))
    entries.sort(reverse=True)  # the last used first
    total = 0
    for number, (_, size, path) in enumerate(entries, start=1):
        total += size
        if number > most_entries or total > most_bytes:
            with suppress(OSError):
                path.unlink()


def content_digest(path: Path, *, within: Path | str | None = None) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal; raises `ForeignFileError` as `open_regular` does.

    That of a large file is remembered under its path, device, inode, size and the times of the last changes of its content and of
    its entry, the second of which no program can set. A file that changed in the last seconds is not remembered, because
    another change could leave these as they are.
    """
    with open_regular(path, within=within) as file:
        status = os.fstat(file.fileno())
        key = _identity(path, status)
        is_large = status.st_size >= SMALLEST_REMEMBERED
        remembered = read_entry(_DIGESTS, key) if is_large else None
        if remembered is not None and _DIGEST.fullmatch(remembered):
            return remembered.decode()
        content: Any = file
        if status.st_size < _LARGE_FILE:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        else:
            with phase(f"reading {path} for changes ({status.st_size / 1e9:.1f} GB)"):
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        new_status = os.fstat(file.fileno())
    is_unchanged = _identity(path, new_status) == key
    if is_large and is_unchanged and is_settled(new_status):
        write_entry(_DIGESTS, key, digest.encode())
    return digest


def is_settled(status: os.stat_result) -> bool:
    """Returns whether a file's last change is old enough for the next one to have another time.

    The time of its content's last change does not count here, because programs set it, even to the future.
    """
    return time.time() - status.st_ctime > SETTLED_SECONDS


def _identity(path: Path, status: os.stat_result) -> str:
    """Returns a digest of where a file is and of what its file system says of it."""
    facts = [
        os.path.realpath(path),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _head(kind: str, key: str, content: bytes) -> bytes:
    """Returns the first line of an entry, which names it and has the checksum of its content."""
    return _FORM + f"{kind} {key} {hashlib.sha256(content).hexdigest()}".encode()
