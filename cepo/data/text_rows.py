"""The rows of JSON and CSV files as JSON objects: texts are as they are written, numbers as they are spelled."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from cepo.data.json_text import read_object
from cepo.data.sources import CSV, JSON, TSV
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import LARGEST_LINE, open_regular
from cepo.files.trees import Tree, is_list, is_mapping

_BOM = b"\xef\xbb\xbf"
_DELIMITERS = {CSV: ",", TSV: "\t"}
_OTHER_DELIMITERS = (";", "\t", "|")
_SEPARATORS = re.compile(r"[\s,]*")
_Record = tuple[int, bytes, str | None]
"""The line where a row begins, from 1, the row as a JSON object, and why it is a bad row."""


def text_rows(files: Sequence[Path], within: Path | None, kind: str) -> Iterator[Tree]:
    """Yields the rows of JSON, CSV or TSV files; the names of a row's columns that no earlier row has are new."""
    names: set[str] = set()
    is_empty = True
    for number, path in enumerate(files):
        with open_regular(path, within=within) as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            records = _json_records(path, file) if kind == JSON else _csv_records(path, file, _DELIMITERS[kind])
            rows, text = 0, b""
            for line, text, fault in records:
                rows += 1
                new_names = [name for name in _names_in(text, fault) if name not in names]
                names.update(new_names)
                is_empty = False
                yield {"text": text, "fault": fault, "file": number, "line": line, "new_names": new_names}
            if kind == JSON and rows == 1 and _holds_columns(text):
                raise ConfigError(
                    f"data file {path} is one object of columns; accepted: one object per row, as "
                    "to_json(orient='records', lines=True) of pandas writes them"
                )
    if is_empty:
        raise ConfigError(f"data file {files[0]} has no rows; accepted: at least one problem")


def _names_in(text: bytes, fault: str | None) -> Sequence[str]:
    try:
        return [] if fault is not None else [*read_object(text)]
    except DataError:  # it is raised where the row is read
        return []


def _holds_columns(text: bytes) -> bool:
    """Returns whether each value of an object is a column: a mapping from numbers, or a list as long as all others.

    A list of messages is none.
    """
    try:
        values = [*read_object(text).values()]
    except DataError:
        return False
    if len(values) < 2:
        return False
    if all(is_mapping(value) and "0" in value for value in values):
        return True
    lists = [value for value in values if is_list(value) and not any(is_mapping(entry) for entry in value)]
    lengths = {len(column) for column in lists}
    return len(lists) == len(values) and len(lengths) == 1 and lengths != {1}


def _json_records(path: Path, file: BinaryIO) -> Iterator[_Record]:
    """Yields the rows of a JSON file: one object in each line, or objects that may take several lines, in an array or not."""
    begin = file.tell()
    first = next((line.strip() for line in file if line.strip()), b"")
    file.seek(begin)
    if first == b"{" or first.startswith(b"["):
        yield from _json_values(path, file.read())
        return
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, line.strip(), None


def _json_values(path: Path, content: bytes) -> Iterator[_Record]:
    """Yields the elements of an array, or values that follow one another."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not text in UTF-8 (at byte {error.start:,})") from error
    decoder = json.JSONDecoder(strict=False, parse_int=str)  # Python refuses very long ones, of which the row is bad
    is_array = text.lstrip().startswith("[")
    place = text.index("[") + 1 if is_array else 0
    line = 1 + text.count("\n", 0, place)
    while True:
        begin = _SEPARATORS.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]  # it matches anywhere
        line += text.count("\n", place, begin)
        if begin == len(text) or (is_array and text[begin] == "]"):
            break
        try:
            _, place = decoder.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno:,}, column {error.colno}"
            raise ConfigError(f"data file {path}, {where}: it is not valid JSON ({error.msg})") from error
        except RecursionError as error:
            raise ConfigError(f"data file {path}, line {line:,}: it is nested too deeply") from error
        yield line, text[begin:place].encode(), None
        line += text.count("\n", begin, place)
    if is_array and begin == len(text):
        raise ConfigError(f"data file {path}: its array of rows, begun with '[', is not closed; it may be incomplete")
    behind = text[begin + 1 :].lstrip()
    if behind:
        line += text.count("\n", begin, len(text) - len(behind))
        raise ConfigError(f"data file {path}, line {line:,}: text follows after the end of its array: {behind[:40]!r}")


def _csv_records(path: Path, file: BinaryIO, delimiter: str) -> Iterator[_Record]:
    """Yields the rows of a CSV file, each field a text, an empty one null. The first row names the columns."""
    csv.field_size_limit(LARGEST_LINE)  # by default 131,072 characters, fewer than an image in base64 has
    # What is not UTF-8 becomes lone surrogates, so that only its own row is bad.
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    try:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = _header(path, reader)
        end = False
        while not end:
            line = reader.line_num + 1
            try:
                fields = next(reader, None)
                end = fields is None
                if fields:
                    row, fault = _csv_row(header, fields)
                    yield line, row, fault
            except csv.Error as error:
                yield line, b"", _csv_fault(path, line, reader.line_num, error)
    finally:
        text.detach()


def _header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    fault = "names no column"
    names: list[str] = []
    try:
        fields = next(filter(None, reader), list[str]())
        names = [name.strip() for name in fields]
        "".join(names).encode()
    except csv.Error as error:
        fault = f"is not valid CSV ({error})"
    except UnicodeEncodeError:
        fault = "is not text in UTF-8 (in Excel: save as CSV UTF-8)"
        names = []
    if names and names[0].startswith("sep="):
        fault = "is Excel's note of the separator; delete this line"
        names = []
    double = next((name for name in names if name and names.count(name) > 1), None)
    if double is not None:
        fault = f"names the column {double!r:.100} twice"
    other_delimiter = next((mark for mark in _OTHER_DELIMITERS if len(names) == 1 and mark in names[0]), None)
    if other_delimiter is not None:
        fault = f"is one column with {other_delimiter!r} in its name; fields are separated by commas in .csv and by tabs in .tsv"
    if double is not None or other_delimiter is not None or not any(names):
        raise ConfigError(f"data file {path}: its first row, the header, {fault}; accepted: the columns' names")
    return names


def _csv_row(header: Sequence[str], fields: Sequence[str]) -> tuple[bytes, str | None]:
    """Returns a row as a JSON object, and why it is a bad one."""
    if len(fields) != len(header):
        return b"", (
            f"has {len(fields)} fields, and the header has {len(header)}. A field with a comma or a line break in it needs "
            "quotes around it"
        )
    row: dict[str, str | None] = {}
    for number, (name, field) in enumerate(zip(header, fields, strict=True)):
        if name:
            row[name] = field or None
        elif field and not (number == 0 and field.isdecimal()):  # pandas writes its row numbers there
            return b"", f"has the field {field!r:.60} in a column that the header does not name"
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape"), None


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
