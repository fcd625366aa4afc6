"""Reads small Parquet files that another program or user may have written."""

# pyright: basic
# pyarrow has no types.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet

from cepo.errors import DataError

_MOST_VALUES = 200_000_000
"""A step of 1,000 responses of 32,000 tokens has 160 million at most."""


def read_bounded_table(file: Path, opened: IO[bytes], columns: Sequence[str] | None = None) -> Any:
    """Returns the columns, by default all, of the open Parquet file as a table of Arrow.

    Arrow's threads are not used: some still ran when a process ended, which aborted it. `file` names it in messages.

    Raises:
        DataError: it has too many rows or values, of any columns. Repeated values take no space in a file, but memory.
        pyarrow.ArrowException, OSError: it is damaged.
    """
    content = _bounded_file(file, opened)
    return content.read(columns=None if columns is None else list(columns), use_threads=False)


def bounded_batches(file: Path, opened: IO[bytes], columns: Sequence[str], size: int) -> tuple[int, Iterator[Any]]:
    """Returns the number of rows of an open Parquet file, and its columns in batches of so many; raises as above."""
    content = _bounded_file(file, opened)
    batches = content.iter_batches(batch_size=size, columns=list(columns), use_threads=False)
    return content.metadata.num_rows, batches


def _bounded_file(file: Path, opened: IO[bytes]) -> Any:
    content = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
    num_values = 0
    for number in range(content.num_row_groups):
        group = content.metadata.row_group(number)
        for column in range(group.num_columns):
            num_values += group.column(column).num_values
    if num_values > _MOST_VALUES or content.metadata.num_rows > _MOST_VALUES:
        raise DataError(f"{file} has {num_values:,} values; accepted: at most {_MOST_VALUES:,}")
    return content
