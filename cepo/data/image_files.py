"""Finds the file that a cell names or holds: bytes, base64, a data URL, a path, or an address that is downloaded."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cepo.errors import DataError, ForeignFileError
from cepo.files.own_cache import cached
from cepo.files.safe_files import LARGEST_DOWNLOAD, LARGEST_IMAGE, download, read_bytes, require_host

if TYPE_CHECKING:
    from cepo.files.trees import Tree

_MOST_SHOWN = 90
"""The number of characters of a value that messages repeat."""
_LONGEST_PATH = 4096
_MOST_FOLDERS = 100
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".JPG", ".JPEG", ".PNG")
"""The endings under which a missing image is looked for."""
_SHORTEST_BASE64 = 16
"""The shortest image, a PPM file of one pixel, has 14 bytes."""
_DATA_URL = re.compile(r"\s*data:[^,]{0,200},", re.IGNORECASE)
_MAGIC = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II[*+]\0|MM\0[*+]|P[1-6Ffy0][\s#]",
    re.DOTALL,
)
"""How files of the accepted formats begin; BMP's reserved bytes are 0 in every file."""


def shortened(value: str) -> str:
    """Returns a value for a message: in quotation marks, and without its middle if it is long."""
    if len(value) <= _MOST_SHOWN:
        return repr(value)
    half = _MOST_SHOWN // 2
    return f"{value[:half]!r}...{value[-half:]!r} ({len(value):,} characters)"


def name_of(value: object, kind: str = "image") -> str:
    """Returns what messages call an image or video: with its path or address if it has one."""
    if isinstance(value, dict):
        entries = cast("Tree", value)
        value = entries.get("path") or entries.get("bytes")
    if isinstance(value, str) and not _holds_file(value):
        return f"the {kind} {shortened(value)}"
    return f"the {kind}"


def content_or_path(value: object, *, hosts: Collection[str] = ()) -> object:
    """Returns a mapping's `bytes`, or its `path` if it has none, and what base64 or an address holds; else the value.

    Raises `DataError` for base64 that cannot be decoded, an address that may not be downloaded, and a text that is
    neither base64 of an accepted format nor short enough for a path.
    """
    if isinstance(value, dict):
        entries = cast("Tree", value)
        value = entries["bytes"] if entries.get("bytes") is not None else entries.get("path")
    if not isinstance(value, str):
        return value
    is_address = value.startswith(("http://", "https://"))
    if not is_address and _holds_file(value):
        return _decoded(value)
    if len(value) > _LONGEST_PATH:
        raise DataError(
            f"{shortened(value)} does not exist: it is too long for a path or an address, and not base64 of an accepted "
            "format. Encode the file again, or give its path"
        )
    return _downloaded(value, hosts) if is_address else value


def file_content(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> bytes:
    """Returns the content of an image file; `value` is what a cell holds, as in `load_rgb`.

    Raises `DataError` if there is no such file, it lies outside of `image_dir`, or it is too large.
    """
    name = name_of(value)
    value = content_or_path(value, hosts=hosts)
    if isinstance(value, str):
        try:
            return read_bytes(Path(image_dir or "") / value, within=image_dir, largest=LARGEST_IMAGE)
        except ForeignFileError as error:
            raise DataError(f"{name} {error.fault}") from error
    if not isinstance(value, bytes):
        raise DataError(f"{name} is a {type(value).__name__}; accepted: bytes, path, or {{bytes, path}}")
    if len(value) > LARGEST_IMAGE:
        raise DataError(f"{name} has {len(value):,} bytes; accepted: at most {LARGEST_IMAGE:,}")
    return value


def folders_beside(data: Path) -> list[Path]:
    """Returns the folders in which the images of a data file or folder often lie: around it, beside it and above it."""
    place = (data if data.is_dir() else data.parent).absolute()
    try:
        inner = sorted(entry for entry in place.iterdir() if entry.is_dir())
    except OSError:
        inner = []
    return [place, place.parent, place.parent.parent, *inner[:_MOST_FOLDERS]]


def first_missing(values: Iterable[object], image_dir: str | None) -> str | None:
    """Returns the path of the first of a row's files that `image_dir` does not have; None if it has all."""
    for value in values:
        path = value
        if isinstance(value, dict):
            entries = cast("Tree", value)
            path = None if entries.get("bytes") else entries.get("path")
        if not isinstance(path, str) or _holds_file(path):
            continue
        if not os.path.isfile(os.path.join(image_dir or "", path)):
            return path
    return None


def place_of_missing(path: str, image_dir: str | None, folders: Sequence[Path]) -> str:
    """Returns a hint where a missing file is: in one of the folders, or under another ending; empty if in neither."""
    for folder in folders:
        if os.path.isfile(folder / path):
            return f". It lies in {folder}: set data.image_dir={folder}"
    if "\\" in path:
        return ". Write / between folders, not the \\ of Windows"
    for ending in _ENDINGS:
        similar_path = str(Path(path).with_suffix(ending))
        if os.path.isfile(os.path.join(image_dir or "", similar_path)):
            return f". There is {similar_path}: names have their endings, in the same case"
    return ""


def _holds_file(text: str) -> bool:
    """Whether a text is a data URL, or base64 whose first bytes are those of an accepted format."""
    if _DATA_URL.match(text):
        return True
    start = "".join(text[:200].split())[:32]
    if len(start) < _SHORTEST_BASE64 or "." in text:  # which a path to an image has, and base64 has not
        return False
    try:
        return _MAGIC.match(_from_base64(start.rstrip("="))) is not None
    except ValueError:
        return False


def _decoded(text: str) -> bytes:
    """Returns the content of base64, with or without the head of a data URL."""
    if len(text) > LARGEST_IMAGE:
        raise DataError(f"{shortened(text)} is too long; accepted: at most {LARGEST_IMAGE:,} characters of base64")
    head = _DATA_URL.match(text)
    body = text[head.end() :] if head else text
    try:
        return _from_base64(body)
    except ValueError as error:
        raise DataError(f"{shortened(text)} is not valid base64; encode the file again, or give its path") from error


def _from_base64(text: str) -> bytes:
    """Decodes base64 in the usual or the URL-safe alphabet, with or without white space and padding.

    Raises `ValueError` for other characters.
    """
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _downloaded(address: str, hosts: Collection[str]) -> bytes:
    """Returns the content of an address, which is downloaded once into the user's cache, for all processes and runs."""
    require_host(address, hosts)
    key = hashlib.sha256(address.encode()).hexdigest()
    with cached("downloads", key) as entry:
        file = entry / "content"
        if not file.exists():
            file.write_bytes(download(address, hosts, largest=LARGEST_DOWNLOAD))
        return file.read_bytes()
