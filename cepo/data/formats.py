"""Reads data files, one reader for each format. Nothing is inferred: a file's texts are texts, its numbers are as spelled.

JSON and CSV are read as rows of text (`TextRow`), Parquet and Arrow as batches of columns of their own types.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from cepo.data.arrow import pyarrow
from cepo.data.json_text import read_object
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import LARGEST_LINE, open_regular

JSON = "json"
CSV = "csv"
TSV = "tsv"
PARQUET = "parquet"
ARROW = "arrow"
FORMATS = {".parquet": PARQUET, ".json": JSON, ".jsonl": JSON, ".csv": CSV, ".tsv": TSV, ".arrow": ARROW}
TEXT_FORMATS = (JSON, CSV, TSV)
BATCH_BYTES = 32_000_000
"""The size of the rows that are converted at once."""
BATCH_ROWS = 1_000
MOST_COLUMNS = 2_000
_MAGIC = {
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\xfd7zXZ\x00": "an xz archive",
    b"BZh": "a bzip2 archive",
    b"\x04\x22\x4d\x18": "an lz4 archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"version https://git-lfs": "a pointer of Git LFS to a file that was not downloaded (git lfs pull)",
}
"""How files begin that are often found under the name of another format."""
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
"""A whole string of JSON, a bracket, or a comma."""


@dataclass(frozen=True)
class TextRow:
    """One row of a JSON or CSV file: the object as JSON text, or the `fault` for which it is a bad row."""

    line: int  # where it begins in the file, from 1
    text: bytes
    names: tuple[str, ...]  # of its columns
    fault: str | None = None


def format_of(path: Path) -> str | None:
    """Returns the format that a file's ending states, in any case of letters; None for an unknown one."""
    return FORMATS.get(path.suffix.lower())


def text_rows(path: Path, kind: str, *, within: Path | str | None = None) -> Iterator[TextRow]:
    """Yields the rows of a JSON, CSV or TSV file in order; bad rows have a fault.

    Raises `ConfigError` if the file is of another format or has no header, `ForeignFileError` as `open_regular`.
    """
    with open_regular(path, within=within) as file:
        head = file.read(64)
        actual_format = _other_format(head)
        if actual_format is not None:
            raise ConfigError(
                f"data file {path} is {actual_format} under the name of a {kind} file; accepted: text in UTF-8. Unpack or "
                "convert it, or give it its own ending"
            )
        file.seek(len(_BOM) if head.startswith(_BOM) else 0)
        if kind != JSON:
            yield from _table_rows(path, file, "," if kind == CSV else "\t")
        elif _begins_array(path, file):
            yield from _array_rows(path, file)
        elif _begins_object_of_lines(file):
            yield from _object_rows(file)
        else:
            yield from _line_rows(file)


def _other_format(head: bytes) -> str | None:
    """Returns what a file is that begins like this, if that is none of text in UTF-8."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


# JSON


def _begins_array(path: Path, file: BinaryIO) -> bool:
    """Returns whether a JSON file is one array of rows, not a row in each line. Leaves the position as it is.

    A .json file that begins with `[` is. So is a file of lines if its first value is a list of objects: one row would
    not be a list.
    """
    start = file.tell()
    head = b""
    while len(head) < 2:
        block = file.read(65536)
        if not block:
            break
        head = (head + block).lstrip(_SPACE)
        if head.startswith(b"["):
            head = b"[" + head[1:].lstrip(_SPACE)
    file.seek(start)
    if not head.startswith(b"["):
        return False
    return path.suffix.lower() == ".json" or head[1:2] in (b"{", b"]", b"n")


def _begins_object_of_lines(file: BinaryIO) -> bool:
    """Returns whether a JSON file begins with an object that is spread over lines. Leaves the position as it is.

    The first line then opens more than it closes, and the second goes on with a name.
    """
    start = file.tell()
    lines = [line.strip(_SPACE) for line in file.read(65536).split(b"\n")]
    file.seek(start)
    lines = [line for line in lines if line]
    if len(lines) < 2 or not lines[0].startswith(b"{") or not lines[1].startswith(b'"'):
        return False
    depth = 0
    for match in _TOKENS.finditer(lines[0]):
        if match[0] in (b"{", b"["):
            depth += 1
        elif match[0] in (b"}", b"]"):
            depth -= 1
    return depth > 0


def _outermost_tokens(content: mmap.mmap, begin: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yields the commas and closing brackets from `begin` on that are not within a value of JSON.

    Each with its place, and whether it closes a list or an object. Values are not read, only passed over.
    """
    depth = 0
    for match in _TOKENS.finditer(cast(Any, content), begin):
        place = match.start()
        token = content[place : place + 1]
        if token in b"[{":
            depth += 1
        elif depth > 0 and token in b"]}":
            depth -= 1
            if depth == 0:
                yield place, token, True
        elif depth == 0 and token in b",]}":
            yield place, token, False


def _object_rows(file: BinaryIO) -> Iterator[TextRow]:
    """Yields the objects of a file in which each is spread over lines, and what stands between them as bad rows."""
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = file.tell()
    line = 1
    for place, _, closes_value in _outermost_tokens(content, begin):
        if closes_value:
            row = content[begin : place + 1]
            yield from _piece(line, row)
            line += row.count(b"\n")
            begin = place + 1
    yield from _piece(line, content[begin:])


def _piece(line: int, text: bytes) -> Iterator[TextRow]:
    """Yields the row that stands in a piece of a file which begins in `line`, unless the piece is blank."""
    row = text.strip(_SPACE)
    if len(row) > LARGEST_LINE:
        yield TextRow(line, b"", (), f"has more than {LARGEST_LINE:,} bytes")
    elif row:
        blank = len(text) - len(text.lstrip(_SPACE))
        yield _json_row(line + text[:blank].count(b"\n"), row)


def _line_rows(file: BinaryIO) -> Iterator[TextRow]:
    number = 0
    while True:
        line = file.readline(LARGEST_LINE + 1)
        if not line:
            return
        number += 1
        if len(line) > LARGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST_LINE)
            yield TextRow(number, b"", (), f"has more than {LARGEST_LINE:,} bytes")
        elif line.strip(_SPACE):
            yield _json_row(number, line.strip(_SPACE))


def _array_rows(path: Path, file: BinaryIO) -> Iterator[TextRow]:
    """Yields the elements of the array that a file consists of. They are found without reading what is in them."""
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = content.find(b"[", file.tell()) + 1
    end = None
    line = 1 + content[:begin].count(b"\n")
    for place, token, closes_value in _outermost_tokens(content, begin):
        if closes_value:
            continue  # a row ends with the comma or the bracket behind it
        row = content[begin:place]
        if token == b"," and not row.strip(_SPACE):
            yield TextRow(line, b"", (), "is empty: two commas follow each other")
        yield from _piece(line, row)
        line += row.count(b"\n")
        begin = place + 1
        if token != b",":
            end = begin
            break
    if end is None:
        raise ConfigError(f"data file {path}: its array of rows, begun with '[', is not closed; it may be incomplete")
    text_behind = content[end : end + 1_000].strip(_SPACE)
    if text_behind:
        raise ConfigError(
            f"data file {path}, line {line}: text follows after the end of its array: {text_behind[:40]!r}; accepted: one array "
            "of rows, or one row in each line"
        )


def _json_row(line: int, text: bytes) -> TextRow:
    try:
        names = tuple(read_object(text))
    except DataError as error:
        return TextRow(line, b"", (), str(error))
    if len(names) > MOST_COLUMNS:
        return TextRow(line, b"", (), f"has {len(names):,} keys; accepted: at most {MOST_COLUMNS:,}")
    return TextRow(line, text, names)


# CSV


@contextmanager
def _long_fields() -> Generator[None]:
    """Lets the csv module read long fields, of which it refuses those of more than 131,072 characters by default."""
    previous_limit = csv.field_size_limit(LARGEST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(previous_limit)


def _table_rows(path: Path, file: BinaryIO, delimiter: str) -> Iterator[TextRow]:
    """Yields the rows of a CSV file, each field a text, an empty one null. The first row names the columns."""
    # What is not UTF-8 becomes lone surrogates, so that only its own row is bad.
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    try:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        end = False
        while not end:
            line = reader.line_num + 1
            fault = None
            with _long_fields():
                try:
                    fields = next(reader, None)
                except csv.Error as error:
                    fields = []
                    fault = _csv_fault(path, line, reader.line_num, error)
            end = fields is None
            if fields is None or (not fields and fault is None):
                continue  # the end, or a blank line
            if header is None:
                header = _header(path, fields, fault)
            elif fault is not None:
                yield TextRow(line, b"", (), fault)
            else:
                yield _fields_row(line, header, fields)
    finally:
        text.detach()


def _csv_fault(path: Path, begin: int, end: int, error: csv.Error) -> str:
    """Returns why the row of a CSV file from line `begin` to `end` is bad.

    Raises `ConfigError` if a quotation mark took in all lines to the end of the file, which are other rows.
    """
    if end > begin and "unexpected end" in str(error):
        raise ConfigError(
            f"data file {path}, line {begin}: a quotation mark opens a field there that is not closed until the end of the "
            f"file, line {end:,}, so that all rows between are lost. A field that begins with a quotation mark needs "
            'quotation marks around it, and those in it doubled: """a"" is b"'
        )
    lines = f"; it takes in all lines to {end:,}, because of an open quotation mark" if end > begin else ""
    return f"is not valid CSV ({error}{lines})"


def _header(path: Path, fields: Sequence[str], fault: str | None) -> list[str]:
    names = [name.strip() for name in fields]
    if fault is None and any(_is_undecoded(name) for name in names):
        fault = "is not text in UTF-8"
    doubles = sorted({name for name in names if name and names.count(name) > 1})
    if doubles:
        fault = f"names the column {doubles[0]!r:.100} twice"
    if not any(names):
        fault = fault or "names no column"
    if len(names) > MOST_COLUMNS:
        fault = f"names {len(names):,} columns; accepted: at most {MOST_COLUMNS:,}"
    if fault is not None:
        raise ConfigError(f"data file {path}: its first row, the header, {fault}; accepted: the columns' names")
    return names


def _is_undecoded(name: str) -> bool:
    """Returns whether a name has a null byte, or one that is not UTF-8 and was read as half of a surrogate pair."""
    return "\0" in name or "\udc80" <= max(name, default="") <= "\udcff"


def _fields_row(line: int, header: Sequence[str], fields: Sequence[str]) -> TextRow:
    fault = None
    if len(fields) != len(header):
        fault = (
            f"has {len(fields)} fields, and the header has {len(header)}. A field with a comma or a line break in it "
            "needs quotes around it"
        )
    if any("\0" in field for field in fields):
        fault = "has a null byte"
    try:
        "".join(fields).encode("utf-8")
    except UnicodeEncodeError:
        fault = "is not text in UTF-8"
    row: dict[str, str | None] = {}
    for number, (name, field) in enumerate(zip(header, fields, strict=False)):
        if name:
            row[name] = field or None
        elif field and not (number == 0 and field.isdecimal()):  # pandas writes its row numbers there
            fault = fault or f"has the field {field!r:.60} in a column that the header does not name"
    if fault is not None:
        return TextRow(line, b"", (), fault)
    return TextRow(line, json.dumps(row, ensure_ascii=False).encode("utf-8"), tuple(row))


# Parquet and Arrow


def parquet_batches(path: Path, *, within: Path | str | None = None) -> Iterator[Any]:
    """Yields the rows of a Parquet file in batches of about `BATCH_BYTES`; raises `ConfigError` if it is damaged."""
    content = mapped_content(path, within=within)
    head = content.slice(0, min(64, content.size)).to_pybytes()
    actual_format = _other_format(head)
    if actual_format is not None and not head.startswith(b"PAR1"):
        raise ConfigError(f"data file {path} is {actual_format} under the name of a Parquet file")
    with named_errors(path):
        parquet = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content), pre_buffer=False)
        metadata = parquet.metadata
        if metadata.num_rows == 0:
            return
        num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        rows_per_batch = BATCH_BYTES * metadata.num_rows // max(1, num_bytes)
        yield from parquet.iter_batches(batch_size=max(1, min(BATCH_ROWS, rows_per_batch)))


def mapped_arrow(path: Path, *, within: Path | str | None = None) -> Any:
    """Returns the rows of an Arrow file or stream as they lie on the disk; None if they are compressed.

    Raises `ConfigError` if it is damaged or has no rows.
    """
    content = mapped_content(path, within=within)
    batches: list[Any] = []
    with named_errors(path):
        for batch in batches_in(content):
            if not _lies_in(batch, content):
                return None
            batches.append(batch)
    if not batches:
        raise ConfigError(f"data file {path} has no rows")
    return pyarrow.Table.from_batches(batches)


def arrow_batches(path: Path, *, within: Path | str | None = None) -> Iterator[Any]:
    """Yields the batches of an Arrow file or stream; raises `ConfigError` if it is damaged."""
    with named_errors(path):
        yield from batches_in(mapped_content(path, within=within))


def mapped_content(path: Path, *, within: Path | str | None = None) -> Any:
    """Returns the content of a file, mapped into memory; raises as `open_regular`."""
    with open_regular(path, within=within) as file, named_errors(path):
        # Under this name it is the file that was opened and checked. What is mapped needs no open file afterwards.
        mapped = pyarrow.memory_map(f"/dev/fd/{file.fileno()}")
        content = mapped.read_buffer()
        mapped.close()
    return content


def _lies_in(batch: Any, content: Any) -> bool:
    """Returns whether a batch's values are those of `content` themselves, not decompressed ones."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    return all(content.address <= buffer.address <= content.address + content.size for buffer in buffers)


def batches_in(content: Any) -> Iterator[Any]:
    """Yields the batches of an Arrow file or stream in memory. Their offsets are checked, their texts are not."""
    if content.slice(0, 6).to_pybytes() == b"ARROW1":
        reader = pyarrow.ipc.open_file(content)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(content))
    for batch in batches:
        # A wrong offset would end the process when it is followed. Texts are checked as bytes, row by row when read.
        for column in batch.columns:
            if _has_nulls_inside(column.type):  # pyarrow's cast gives such a column another length
                column.validate(full=True)
            else:
                column.cast(_bytes_type(column.type)).validate(full=True)
        yield batch


def _has_nulls_inside(kind: Any) -> bool:
    """Returns whether a list or struct has a field of the type null, at any depth."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pyarrow.types.is_null(field) or _has_nulls_inside(field) for field in inner)


def _without_texts(field: Any) -> Any:
    return field.with_type(_bytes_type(field.type))


def _bytes_type(kind: Any) -> Any:
    """Returns a type with bytes in place of texts, at any depth of lists and structs."""
    if pyarrow.types.is_string(kind):
        return pyarrow.binary()
    if pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_without_texts(kind.value_field))
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(_without_texts(kind.value_field))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([_without_texts(kind.field(number)) for number in range(kind.num_fields)])
    return kind


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Converts the errors of pyarrow's readers to `ConfigError` with the file's name."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError | DataError):
            raise
        reason = str(error).partition("\n")[0][:300]
        raise ConfigError(f"data file {path} cannot be read: {type(error).__name__}: {reason}") from error
