"""Writes JSON lines. A crash leaves at most an incomplete last line, which the next run removes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from cepo.errors import DataError
from cepo.foreign_files import objects_in, open_regular


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
    number = float(value)
    return number if math.isfinite(number) else None


class LineFile:
    """A file of JSON lines opened for appending. Rows reach the operating system at once, and the disk with `to_disk`.

    Opening removes an incomplete last line and, if `last_step` is given, all rows from the first later step on.

    Attributes:
        last: the last row; None in an empty file.
        num_cut: number of rows that were removed.

    Raises:
        DataError: the file is a pipe or a link out of its folder, a line is not a row, or a row has no `step` although
            `last_step` is given.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        if not path.is_symlink():
            path.touch()
        self._file = open_regular(path, within=path.parent, writable=True)
        self.last: Mapping[str, object] | None = None
        self.num_cut = self._last_start = end = 0
        for row, length in objects_in(path, self._file):
            if last_step is not None and not isinstance(row.get("step"), int):
                raise DataError(f"{path}: a row has no 'step'. Remove that line")
            if self.num_cut or (last_step is not None and row["step"] > last_step):
                self.num_cut += 1
            else:
                self.last, self._last_start, end = row, end, end + length
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
