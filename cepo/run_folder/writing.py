"""Writes files so that a crash leaves the old or the new content, and appends lines to records."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from cepo.errors import DataError
from cepo.files.safe_files import objects_in, open_regular
from cepo.files.trees import Fields

logger = logging.getLogger(__name__)


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes a new file, hidden until it replaces the old one, so that a reader never sees a partial file.

    The content is on the disk before the rename, and the rename is when this returns. With `private`, only the owner
    may read the file.
    """
    new_file = path.with_name(f".{path.name}.new")
    new_file.unlink(missing_ok=True)
    permissions = 0o600 if private else 0o666
    descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    if isinstance(content, str):
        content = content.encode()
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_file, path)
    to_disk(path.parent)


def encode_line(row: Mapping[str, object]) -> bytes:
    """Encodes a row as a line of JSON; lone surrogates, which UTF-8 lacks, are escaped and read back the same."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def to_disk(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite_or_none(value: float) -> float | None:
    """Replaces NaN and infinities, which JSON lacks, by None; readers turn None into NaN."""
    return float(value) if math.isfinite(value) else None


class LineFile:
    """A file of JSON lines opened for appending. Rows reach the operating system at once, and the disk with `to_disk`.

    Opening removes an incomplete last line and, if `last_step` is given, all rows from the first later step on. `last`
    is the last row, None in an empty file. Raises `DataError`: the file is a pipe or a link out of its folder, a line is
    not a row, or a row lacks a `step` that is needed.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        if not path.is_symlink():
            path.touch()
        self._file = open_regular(path, within=path.parent, writable=True)
        self.last: Fields | None = None
        self._last_start = 0
        end = 0  # of the last row that stays
        for row, length in objects_in(path, self._file):
            if last_step is not None and not isinstance(row.get("step"), int):
                raise DataError(f"{path}: a row has no 'step'. Remove that line")
            if last_step is not None and row["step"] > last_step:
                logger.info("%s: the rows after step %d, from which the run resumes, are dropped", path, last_step)
                break
            self.last = row
            self._last_start = end
            end += length
        self._file.seek(end)
        self._file.truncate()

    def append(self, row: Mapping[str, object]) -> None:
        self._last_start = self._file.tell()
        self.replace_last(row)

    def replace_last(self, row: Mapping[str, object]) -> None:
        self._file.seek(self._last_start)
        self._file.write(encode_line(row))
        self._file.truncate()
        self._file.flush()
        self.last = row

    def to_disk(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
