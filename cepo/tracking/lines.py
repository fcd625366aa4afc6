"""Files of one JSON object per line that survive a crash: appended only, a torn last line is tolerated and later cut."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cepo.errors import DataError

_BLOCK_BYTES = 1 << 16


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; a last line that a crash cut short is passed over.

    Raises:
        DataError: a line other than a torn last one is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            found = _parsed(line)
            if found is not None:
                yield found
            elif line.endswith(b"\n"):
                raise DataError(
                    f"{path}, line {number}: not a JSON object: {line[:60]!r}. Every line must be one; "
                    "only the last line may be incomplete. Remove that line to read the rest."
                )


def drop_rows_after(path: Path, step: int) -> int:
    """Drops all rows whose `step` is larger, and a torn last line. The new file is written beside and renamed.

    Raises:
        DataError: a row has no step, or a line is no row.

    Returns:
        The number of rows dropped; 0 where there is no file.
    """
    if not path.exists():
        return 0
    dropped = 0
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        for row in read_objects(path):
            if not isinstance(row.get("step"), int):
                raise DataError(f"{path}: a row has no 'step'; it has {', '.join(row) or 'nothing'}. Remove that line")
            if row["step"] > step:
                dropped += 1
            else:
                file.write(encode_line(row))
    os.replace(beside, path)
    return dropped


def encode_line(row: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON. A lone surrogate, which UTF-8 cannot hold, becomes JSON's own escape and reads back the same."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity: they are written as null and read back as NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


class LineFile:
    """A file of JSON lines open for appending. Each row reaches the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._file = path.open("r+b")
        self._last_start = self._mend()

    def last(self) -> dict[str, Any] | None:
        """The last row, None in an empty file."""
        self._file.seek(self._last_start)
        return _parsed(self._file.read())

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row at the end."""
        self._last_start = self._file.seek(0, os.SEEK_END)
        self._file.write(encode_line(row))
        self._file.flush()

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Writes a row over the last one."""
        self._file.seek(self._last_start)
        self._file.write(encode_line(row))
        self._file.truncate()
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _mend(self) -> int:
        """Cuts a torn last line, or ends a complete one that lacks its newline; gives the offset of the last line."""
        start = self._start_of_line(self._file.seek(0, os.SEEK_END))
        self._file.seek(start)
        tail = self._file.read()
        if not tail or tail.endswith(b"\n"):
            return start
        if _parsed(tail) is not None:
            self._file.write(b"\n")
            self._file.flush()
            return start
        self._file.seek(start)
        self._file.truncate()
        return self._start_of_line(start)

    def _start_of_line(self, end: int) -> int:
        """The offset after the last newline before `end - 1`, so that a newline at the very end does not count."""
        position = max(end - 1, 0)
        while position > 0:
            block_start = max(position - _BLOCK_BYTES, 0)
            self._file.seek(block_start)
            found = self._file.read(position - block_start).rfind(b"\n")
            if found >= 0:
                return block_start + found + 1
            position = block_start
        return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object a line holds, None where it holds none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
