"""Converts a data file once to an Arrow file in the user's cache, from which its rows are mapped into memory.

The copy is found by the file's content, so that a changed file is never read from an old copy. An Arrow file that can be
mapped itself needs none.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from cepo.data.arrow import pyarrow
from cepo.data.cache import content_digest, new_file, prune, usable_folder
from cepo.data.formats import (
    ARROW,
    BATCH_BYTES,
    BATCH_ROWS,
    JSON,
    MOST_COLUMNS,
    PARQUET,
    TEXT_FORMATS,
    arrow_batches,
    batches_in,
    format_of,
    mapped_arrow,
    mapped_content,
    parquet_batches,
    text_rows,
)
from cepo.data.table import Part, TextPart, TypedPart
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import size_of
from cepo.terminal.progress import phase

logger = logging.getLogger(__name__)

_FORM = "2"
"""Part of a copy's name; another one is needed when copies are written otherwise."""
_MOST_COPIES = 10_000
_MOST_BYTES = 200_000_000_000
"""Copies that were not used for the longest time are removed until these hold, before another one is written."""
_LONG_BYTES = 100_000_000
"""The size of files whose conversion takes long enough to be reported."""
_TOGETHER_BYTES = 64_000_000
"""The size up to which text files have one copy together: some data sets have a file for each row."""
_TEXT_SCHEMA = pyarrow.schema(
    [
        ("text", pyarrow.large_binary()),
        ("fault", pyarrow.string()),
        ("file", pyarrow.int32()),
        ("line", pyarrow.int64()),
    ]
)
_NAMES_LINE = -1
"""The line of a copy's last row, whose text is the list of the columns' names: they are known only at the end."""


def open_parts(files: Sequence[Path], *, within: Path | str | None = None) -> list[Part]:
    """Opens the rows of data files of one format, in order.

    Raises `ConfigError` if one is not of the format that its ending states or has no readable row, `DataError` for its
    types, `ForeignFileError` if it leads out of `within` or is no regular file.
    """
    kind = format_of(files[0])
    assert kind is not None, "the files of a source have known endings"
    if kind in TEXT_FORMATS:
        return [_text_part(group, kind, within) for group in _groups(files, within)]
    parts: list[Part] = []
    for file in files:
        table = mapped_arrow(file, within=within) if kind == ARROW else None
        if table is None:
            table = _converted([file], kind, within)
        parts.append(TypedPart(table, [file]))
    return parts


def _groups(files: Sequence[Path], within: Path | str | None) -> list[list[Path]]:
    """Returns the files in groups, in order: small ones together, up to `_TOGETHER_BYTES`, large ones alone."""
    groups: list[list[Path]] = []
    total = 0
    for file in files:
        size = size_of(file, within=within)
        total += size
        if not groups or total > _TOGETHER_BYTES:
            groups.append([])
            total = size
        groups[-1].append(file)
    return groups


def _text_part(files: Sequence[Path], kind: str, within: Path | str | None) -> TextPart:
    table = _converted(files, kind, within)
    last = table.num_rows - 1
    names: list[str] = json.loads(table.column("text")[last].as_py())
    part = TextPart(table.slice(0, last), names, files)
    if len(part) and not names:
        try:
            part.row(0, None)
        except DataError as error:
            hint = ". Accepted: one JSON object in each line, or one array of objects" if kind == JSON else ""
            raise ConfigError(f"data file {files[0]} has no readable row: {error}{hint}") from error
    return part


def _converted(files: Sequence[Path], kind: str, within: Path | str | None) -> Any:
    """Returns the table of the copy of files, which is written if there is none."""
    folder = usable_folder("rows") or _temporary_folder()
    digests = [content_digest(file, within=within) for file in files]
    key = digests[0] if len(files) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    copy = folder / f"{key}-{kind}-{_FORM}.arrow"
    if copy.exists():
        table = _read_copy(copy, kind)
        if table is not None:
            with suppress(OSError):  # for the order in which copies are removed
                os.utime(copy)
            return table
        logger.info("the copy %s of %s is damaged and is written again", copy, files[0])
    with _turn_to_write(copy):
        table = _read_copy(copy, kind) if copy.exists() else None
        if table is None:  # otherwise another process has written it meanwhile
            prune(folder, most_entries=_MOST_COPIES, most_bytes=_MOST_BYTES)
            _replace_copy(copy, files, kind, within)
            table = _read_copy(copy, kind)
    assert table is not None, "a copy that was just written can be read"
    return table


@contextmanager
def _turn_to_write(copy: Path) -> Generator[None]:
    """Lets one process at a time write a copy: all ranks of a node open the same files at the same time."""
    with open(copy.with_name(f".new-lock-{copy.stem}"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace_copy(copy: Path, files: Sequence[Path], kind: str, within: Path | str | None) -> None:
    """Writes the copy of files, whole or not at all; raises `ConfigError` if one changes meanwhile."""
    states = [_state(file) for file in files]
    with ExitStack() as stack:
        temporary_file = stack.enter_context(new_file(copy))
        if sum(size for size, _, _ in states) >= _LONG_BYTES:
            stack.enter_context(phase(f"converting {files[0]} to Arrow in {copy.parent}, once"))
        _write_copy(temporary_file, files, kind, within)
        if states != [_state(file) for file in files]:
            raise ConfigError(f"data file {files[0]}, or one read with it, changed while it was read; start again")


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@cache
def _temporary_folder() -> Path:
    """Returns the folder of copies in place of a cache folder that cannot be used; it goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="cepo-rows-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read_copy(copy: Path, kind: str) -> Any:
    """Returns the table of a copy, mapped into memory; None if the copy is damaged."""
    try:
        batches = list(batches_in(mapped_content(copy)))
    except (pyarrow.ArrowException, OSError, ValueError):
        return None
    table = pyarrow.Table.from_batches(batches) if batches else None
    if table is None or not table.num_rows:
        return None
    if kind in TEXT_FORMATS and table.column("line")[table.num_rows - 1].as_py() != _NAMES_LINE:
        return None
    return table


def _write_copy(copy: Path, files: Sequence[Path], kind: str, within: Path | str | None) -> None:
    """Writes the rows of the files as a stream of Arrow batches; raises `ConfigError` if there are none."""
    if kind in TEXT_FORMATS:
        batches = _text_batches(files, kind, within)
    elif kind == PARQUET:
        batches = parquet_batches(files[0], within=within)
    else:
        batches = arrow_batches(files[0], within=within)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"data file {files[0]} has no rows; accepted: at least one problem")
    with pyarrow.OSFile(str(copy), "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


class _TextColumns:
    """The rows of text files that are written together next."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.faults: list[str | None] = []
        self.files: list[int] = []
        self.lines: list[int] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size >= BATCH_BYTES or len(self.texts) >= BATCH_ROWS

    def add(self, text: bytes, fault: str | None, file: int, line: int) -> None:
        self.texts.append(text)
        self.faults.append(fault)
        self.files.append(file)
        self.lines.append(line)
        self._size += len(text)

    def batch(self) -> Any:
        columns = (self.texts, self.faults, self.files, self.lines)
        arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, _TEXT_SCHEMA.types, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=_TEXT_SCHEMA)


def _text_batches(files: Sequence[Path], kind: str, within: Path | str | None) -> Iterator[Any]:
    """Yields the rows of text files in batches of bounded size, and after them the names of all columns."""
    names: dict[str, None] = {}
    columns = _TextColumns()
    has_rows = False
    for number, file in enumerate(files):
        for row in text_rows(file, kind, within=within):
            names.update(dict.fromkeys(row.names))
            if len(names) > MOST_COLUMNS:
                raise ConfigError(
                    f"data file {file}, line {row.line}: its rows have more than {MOST_COLUMNS:,} different columns; accepted: "
                    "rows with the same ones"
                )
            has_rows = True
            columns.add(row.text, row.fault, number, row.line)
            if columns.is_full:
                yield columns.batch()
                columns = _TextColumns()
    if columns.texts:
        yield columns.batch()
    if has_rows:
        columns = _TextColumns()
        columns.add(json.dumps(list(names)).encode(), None, 0, _NAMES_LINE)
        yield columns.batch()
