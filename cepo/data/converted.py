"""Converts a data file once to an Arrow file in the user's cache, from which its rows are mapped into memory.

The copy is found by the file's content, so that a changed file is never read from an old copy. An Arrow file that can be
mapped itself needs none.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
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
from cepo.foreign_files import size_of
from cepo.progress import phase

logger = logging.getLogger(__name__)

_FORM = "1"
"""Part of a copy's name; another one is needed when copies are written otherwise."""
_MOST_COPIES, _MOST_BYTES = 1_000, 200_000_000_000
"""Copies that were not used for the longest time are removed until these hold, before another one is written."""
_LONG_BYTES = 100_000_000
"""The size of a file whose conversion takes long enough to be reported."""
_TEXT_SCHEMA = pyarrow.schema(
    [("text", pyarrow.large_binary()), ("fault", pyarrow.string()), ("line", pyarrow.int64())]
)
_NAMES_LINE = -1
"""The line of a copy's last row, whose text is the list of the columns' names: they are known only at the end."""


def open_part(path: Path, *, within: Path | str | None = None) -> Part:
    """Opens the rows of a data file.

    Raises `ConfigError` if it is not of the format that its ending states or has no readable row, `DataError` for its
    types, `ForeignFileError` if it leads out of `within` or is no regular file.
    """
    kind = format_of(path)
    assert kind is not None, "the files of a source have known endings"
    table = mapped_arrow(path, within=within) if kind == ARROW else None
    if table is None:
        table = _converted(path, kind, within)
    if kind in TEXT_FORMATS:
        return _text_part(table, path, kind)
    return TypedPart(table, [path])


def _text_part(table: Any, path: Path, kind: str) -> TextPart:
    last = table.num_rows - 1
    names: list[str] = json.loads(table.column("text")[last].as_py())
    part = TextPart(table.slice(0, last), names, path)
    if len(part) and not names:
        try:
            part.row(0, None)
        except DataError as error:
            hint = ". Accepted: one JSON object in each line, or one array of objects" if kind == JSON else ""
            raise ConfigError(f"data file {path} has no readable row: {error}{hint}") from error
    return part


def _converted(path: Path, kind: str, within: Path | str | None) -> Any:
    """Returns the table of a file's copy, which is written if there is none."""
    folder = usable_folder("rows") or _temporary_folder()
    copy = folder / f"{content_digest(path, within=within)}-{kind}-{_FORM}.arrow"
    if copy.exists():
        table = _read_copy(copy)
        if table is not None:
            with suppress(OSError):  # for the order in which copies are removed
                os.utime(copy)
            return table
        logger.info("the copy %s of %s is damaged and is written again", copy, path)
    prune(folder, most_entries=_MOST_COPIES, most_bytes=_MOST_BYTES)
    with new_file(copy) as beside:
        if size_of(path, within=within) < _LONG_BYTES:
            _write_copy(beside, path, kind, within)
        else:
            with phase(f"converting {path} to Arrow in {folder}, once"):
                _write_copy(beside, path, kind, within)
    table = _read_copy(copy)
    assert table is not None, "a copy that was just written can be read"
    return table


@cache
def _temporary_folder() -> Path:
    """Returns the folder of copies in place of a cache folder that cannot be used; it goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="cepo-rows-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read_copy(copy: Path) -> Any:
    """Returns the table of a copy, mapped into memory; None if the copy is damaged."""
    try:
        batches = list(batches_in(mapped_content(copy)))
    except (pyarrow.ArrowException, OSError, ValueError):
        return None
    return pyarrow.Table.from_batches(batches) if batches else None


def _write_copy(copy: Path, path: Path, kind: str, within: Path | str | None) -> None:
    """Writes the rows of `path` as a stream of Arrow batches; raises `ConfigError` if there are none."""
    if kind in TEXT_FORMATS:
        batches = _text_batches(path, kind, within)
    else:
        batches = (parquet_batches if kind == PARQUET else arrow_batches)(path, within=within)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"data file {path} has no rows; accepted: at least one problem")
    with pyarrow.OSFile(str(copy), "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _text_batches(path: Path, kind: str, within: Path | str | None) -> Iterator[Any]:
    """Yields the rows of a text file in batches of bounded size, and after them the names of all columns."""
    names: dict[str, None] = {}
    texts: list[bytes] = []
    faults: list[str | None] = []
    lines: list[int] = []
    size = 0
    has_rows = False
    for row in text_rows(path, kind, within=within):
        names.update(dict.fromkeys(row.names))
        if len(names) > MOST_COLUMNS:
            raise ConfigError(
                f"data file {path}, line {row.line}: its rows have more than {MOST_COLUMNS:,} different columns; accepted: rows "
                "with the same ones"
            )
        has_rows = True
        texts.append(row.text)
        faults.append(row.fault)
        lines.append(row.line)
        size += len(row.text)
        if size >= BATCH_BYTES or len(texts) >= BATCH_ROWS:
            yield _text_batch(texts, faults, lines)
            texts, faults, lines, size = [], [], [], 0
    if texts:
        yield _text_batch(texts, faults, lines)
    if has_rows:
        yield _text_batch([json.dumps(list(names)).encode()], [None], [_NAMES_LINE])


def _text_batch(texts: list[bytes], faults: list[str | None], lines: list[int]) -> Any:
    return pyarrow.RecordBatch.from_arrays(
        [
            pyarrow.array(texts, pyarrow.large_binary()),
            pyarrow.array(faults, pyarrow.string()),
            pyarrow.array(lines, pyarrow.int64()),
        ],
        schema=_TEXT_SCHEMA,
    )
