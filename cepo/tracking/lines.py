"""Reads and writes JSON lines. A crash leaves at most an incomplete last line, which the next run removes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cepo.errors import CepoError, DataError


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file in order; skips an incomplete last line.

    Raises:
        DataError: a line other than an incomplete last one is not a JSON object.
    """
    with path.open("rb") as file:
        yield from (row for row, _ in _rows(path, file))


def _rows(path: Path, file: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number}: not a JSON object: {line[:60]!r}. Every line must be one; "
                "only the last line may be incomplete. Remove that line to read the rest."
            )
        yield row, len(line)


@contextmanager
def damaged_as(path: Path, problem: str) -> Iterator[None]:
    """Converts errors from reading and using the file `path` to `DataError`; `problem` follows the path in the message.

    Raises:
        DataError: the file cannot be read, or its content is incomplete or malformed.
    """
    try:
        yield
    except CepoError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} {problem}: {type(error).__name__}: {error}") from error


def encode_line(row: Mapping[str, Any]) -> bytes:
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
        DataError: a line is not a row, or has no `step` although `last_step` is given.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        path.touch()
        self._file = path.open("r+b")
        self.last: Mapping[str, Any] | None = None
        self.num_cut = self._last_start = end = 0
        for row, length in _rows(path, self._file):
            if last_step is not None and not isinstance(row.get("step"), int):
                raise DataError(f"{path}: a row has no 'step'; it has {', '.join(row) or 'nothing'}. Remove that line")
            if self.num_cut or (last_step is not None and row["step"] > last_step):
                self.num_cut += 1
            else:
                self.last, self._last_start, end = row, end, end + length
        self._file.seek(end)
        self._file.truncate()

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row."""
        self._last_start = self._file.tell()
        self.replace_last(row)

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Overwrites the last row."""
        self._file.seek(self._last_start)
        self._file.write(encode_line(row))
        self._file.truncate()
        self._file.flush()
        self.last = row

    def to_disk(self) -> None:
        """Flushes all rows to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
