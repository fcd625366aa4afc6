"""Reads files that others may have made: run folders, data, images, configurations, model folders, index files.

One policy holds for all of them. A file is regular (a pipe or a device would block or never end), is at most as large as
a limit that is checked before reading, and has the stated format. Where a folder is given, neither a path nor a link
leads out of it. Anything else raises `ForeignFileError`, which names the file and the fault. It never repeats content, which
could be that of another file. An address is downloaded only from hosts that the user names (`download`).
"""

from __future__ import annotations

import io
import json
import os
import stat
import urllib.request
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from cepo.errors import CepoError, DataError, ForeignFileError
from cepo.files.trees import Tree

LFS_POINTER = b"version https://git-lfs"
LARGEST_TEXT = 10_000_000
"""The largest configuration, prompt or template, in bytes."""
LARGEST_JSON = 200_000_000
"""The largest JSON file; tokenizers have up to 40 MB."""
LARGEST_LINE = 100_000_000
"""The largest line of a file of JSON lines; the number of lines is not limited."""
LARGEST_IMAGE = 200_000_000
"""The largest image file."""
LARGEST_DOWNLOAD = 50_000_000
"""The largest image that is downloaded."""
_DOWNLOAD_SECONDS = 30.0
_MOST_REDIRECTS = 3

OpenedFile = tuple[str, os.stat_result | None]
"""An absolute path, or an address, and what its file system said of the opened file; None if it could not be opened."""
_opened: ContextVar[list[OpenedFile] | None] = ContextVar("opened files", default=None)


@contextmanager
def noting_opened_files() -> Generator[list[OpenedFile]]:
    """Yields a list to which this module adds every file that this thread opens, or fails to open, in the context.

    A failed download is added too, by its address.
    """
    noted: list[OpenedFile] = []
    token = _opened.set(noted)
    try:
        yield noted
    finally:
        _opened.reset(token)


def _note(path: Path | None, status: os.stat_result | None, *, address: str = "") -> None:
    notes = _opened.get()
    if notes is not None:
        name = address if path is None else str(Path.cwd() / path)
        notes.append((name, status))


def require_within(path: Path, folder: Path | str | None) -> Path:
    """Returns the place to which a path leads after all links; it must exist, below `folder` if that is not None."""
    try:
        target = Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ForeignFileError(path, _unreadable(error)) from error
    if folder is not None and not target.is_relative_to(os.path.realpath(folder)):
        raise ForeignFileError(
            path, f"lies outside of {folder}, or is a link that leads out of it; copy the file there"
        )
    return target


def hub_folder(folder: Path) -> Path:
    """Returns the folder that holds the files of a model or a data set: itself, or the repository in the hub's cache.

    In that cache, the files of a snapshot are links to `blobs`.
    """
    for parent in folder.absolute().parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return folder


def open_regular(
    path: Path, *, within: Path | str | None = None, largest: int | None = None, writable: bool = False
) -> BinaryIO:
    """Opens a regular file in binary mode; with `writable`, for reading and writing.

    Raises `ForeignFileError` if a link leads out of the folder `within`, the file has more than `largest` bytes, or it
    breaks this module's policy otherwise.
    """
    try:
        descriptor = _open_target(path, within, writable=writable)
    except ForeignFileError:
        _note(path, None)
        raise
    status = os.fstat(descriptor)
    _note(path, status)
    fault: str | None = None
    if not stat.S_ISREG(status.st_mode):
        fault = "is not a regular file"
    if largest is not None and status.st_size > largest:
        fault = f"has {status.st_size:,} bytes; accepted: at most {largest:,}"
    if fault is not None:
        os.close(descriptor)
        raise ForeignFileError(path, fault)
    return os.fdopen(descriptor, "r+b" if writable else "rb")


def _open_target(path: Path, within: Path | str | None, *, writable: bool) -> int:
    """Returns a descriptor of the file to which a path leads; raises `ForeignFileError` if there is none to open."""
    # Without O_NONBLOCK, opening a pipe would wait for its other end. The path has no more links.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
    target = require_within(path, within)
    try:
        return os.open(target, flags)
    except OSError as error:
        raise ForeignFileError(path, _unreadable(error)) from error


def private_folder(folder: Path) -> Path:
    """Returns a folder of this user's into which nobody else can write or look; it is created if it does not exist.

    Raises `ForeignFileError`: it is a link or no folder, another user owns it, or others may have written into it; OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(folder, "is a link")
    if status.st_uid != os.getuid():
        raise ForeignFileError(folder, "belongs to another user; name another folder")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignFileError(folder, f"can be written by others; remove it, or close it with chmod 700 {folder}")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def irregular_file(folder: Path) -> Path | None:
    """Returns the first entry below a folder that is neither a regular file nor a folder: a link, a pipe, a device."""
    for path in sorted(folder.rglob("*")):
        is_file_or_folder = path.is_file() or path.is_dir()
        if path.is_symlink() or not is_file_or_folder:
            return path
    return None


def is_lfs_pointer(path: Path) -> bool:
    """Returns whether a file is what Git LFS leaves in place of one that has not been fetched."""
    with open_regular(path) as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def size_of(path: Path, *, within: Path | str | None = None) -> int:
    """Returns the number of bytes of a regular file; raises as `open_regular`."""
    with open_regular(path, within=within) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: Path, *, within: Path | str | None = None, largest: int = LARGEST_TEXT) -> bytes:
    """Returns the content of a regular file; raises `ForeignFileError` as `open_regular` does, or if reading it fails."""
    with open_regular(path, within=within, largest=largest) as file:
        try:
            return file.read(largest)
        except OSError as error:
            raise ForeignFileError(path, _unreadable(error)) from error


def read_text(path: Path, *, within: Path | str | None = None) -> str:
    """Returns the text of a file in UTF-8, with line ends as `\\n`; raises `ForeignFileError` as `open_regular` does."""
    content = read_bytes(path, within=within)
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ForeignFileError(path, f"is not text in UTF-8 (at byte {error.start})") from error


def read_json(path: Path, kind: type, *, within: Path | str | None = None) -> Any:
    """Returns the content of a JSON file, which is a `kind` (dict or list); raises `ForeignFileError` for anything else."""
    content = read_bytes(path, within=within, largest=LARGEST_JSON)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ForeignFileError(path, f"is not valid JSON{where}") from error
    if not isinstance(value, kind):
        raise ForeignFileError(path, f"does not hold {'an object' if kind is dict else 'a list'} in JSON")
    return value


def read_objects(path: Path, *, within: Path | str | None = None) -> Iterator[Tree]:
    """Yields the objects of a file of JSON lines in order; skips an incomplete last line.

    Raises `ForeignFileError` as `open_regular` does, and for another line that is not an object.
    """
    with open_regular(path, within=within) as file:
        yield from (row for row, _ in objects_in(path, file))


def objects_in(
    path: Path, file: BinaryIO, number: int = 0, *, reads_open_end: bool = False
) -> Iterator[tuple[Tree, int]]:
    """Yields the objects of an open file of JSON lines with the lengths of their lines; raises as `read_objects`.

    `number` lines have been read before. With `reads_open_end`, for files of other programs, a last line that lacks only its
    line feed is read too, and empty lines are passed over.
    """
    while line := file.readline(LARGEST_LINE):
        number += 1
        if reads_open_end and not line.strip():
            continue
        has_open_end = not line.endswith(b"\n") and len(line) < LARGEST_LINE
        if has_open_end and not reads_open_end:
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if has_open_end and not isinstance(row, dict):
            return
        if not isinstance(row, dict):
            raise ForeignFileError(
                path,
                f"is damaged in line {number}: every line must be a JSON object of at most {LARGEST_LINE:,} bytes; only the "
                "last may be incomplete. Remove that line to read the rest.",
            )
        yield cast("Tree", row), len(line)


@contextmanager
def damaged_as(path: Path, problem: str) -> Generator[None]:
    """Converts errors from reading and using the file `path` to `DataError`; `problem` follows the path in the message."""
    try:
        yield
    except ForeignFileError as error:
        raise DataError(f"{path} {problem}: it {error.fault}") from error
    except CepoError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise DataError(f"{path} {problem} ({type(error).__name__})") from error


def require_host(address: str, hosts: Collection[str]) -> None:
    """Raises `DataError` unless an address may be downloaded.

    It may if `hosts` has its host (with a port, `host:port`) for https, or scheme and host for http.
    """
    try:
        parts = urlsplit(address)
        host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    except ValueError as error:
        raise DataError(f"{address:.100} is not a valid address ({error})") from error
    named = {"https": host, "http": f"http://{host}"}.get(parts.scheme)
    if named is None or named not in hosts:
        raise DataError(
            f"{address:.100} is an address; images are downloaded only from data.image_hosts, which is "
            f"{', '.join(hosts) or 'empty'}. Name {named or 'an https host':.100} there, or download the file and give its path"
        )


class _WithinHosts(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that may be downloaded."""

    max_redirections = _MOST_REDIRECTS

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        require_host(newurl, self._hosts)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(address: str, hosts: Collection[str], *, largest: int) -> bytes:
    """Returns what an address that `require_host` accepts holds, without proxies; redirects stay within `hosts`.

    Raises `DataError`, which `noting_opened_files` notes, if the answer is too large, late, incomplete or an error.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _WithinHosts(hosts))
    try:
        with opener.open(address, timeout=_DOWNLOAD_SECONDS) as answer:
            content: bytes = answer.read(largest + 1)
            if len(content) > largest:
                raise OSError(f"it has more than {largest:,} bytes")
            if answer.length:
                raise OSError("the answer is incomplete")
    except (DataError, OSError, HTTPException, ValueError) as error:
        _note(None, None, address=address)
        raise DataError(f"{address:.100} cannot be downloaded: {error or type(error).__name__}") from error
    return content


def _unreadable(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"cannot be read: {reason or error}"
