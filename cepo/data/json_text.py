"""JSON and Python's literals as rows have them: numbers keep the spelling of the file."""

from __future__ import annotations

import ast
import datetime
import decimal
import json
import math
import re
from collections.abc import Sequence
from typing import Any, cast

from cepo.errors import DataError
from cepo.files.trees import Tree, is_dict, is_mapping

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class WrittenFloat(float):
    """A number of a JSON file with its spelling there in `text`."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[WrittenFloat], tuple[str]]:
        return WrittenFloat, (self.text,)


def read_object(line: bytes) -> Tree:
    """Returns the JSON object of a row, with numbers as `WrittenFloat` and int, and None for NaN.

    Raises `DataError`, whose message continues "the row ...": it is no object, not in UTF-8, nested too deeply, has a key
    twice, or a character that does not exist.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"is not text in UTF-8 (at byte {error.start})") from error
    row = read_value(text)
    if not is_dict(row):
        kind = "null" if row is None else f"a {_KINDS.get(type(row).__name__, 'number')}"
        raise DataError(f"is {kind}; accepted: one JSON object per row")
    if _SURROGATE.search(line):
        _require_characters(row)
    return row


_KINDS = {"list": "list", "str": "text", "bool": "truth value"}


def read_value(text: str) -> Any:
    """Returns the value of a JSON text; raises `DataError` as `read_object`."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"is not valid JSON ({error.msg}, at character {error.pos})") from error
    except RecursionError as error:
        raise DataError("is nested too deeply") from error


def read_literal(text: str) -> Any:
    """Returns the value of a JSON text, or of Python's `repr` of one; raises `DataError` for any other text.

    Byte order marks before it do not count.
    """
    text = text.lstrip("\ufeff")
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise DataError("is neither JSON nor a Python literal") from error


def _require_characters(row: Tree) -> None:
    """Raises `DataError` for half of a surrogate pair, which no file can be written with."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise DataError(
            f"has the character \\u{code:x}, half of a pair that stands for one, or a byte that is not UTF-8"
        ) from error


def _object(pairs: Sequence[tuple[str, Any]]) -> Tree:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise DataError(f"has the key {double!r:.100} twice")
    return entries


def _integer(text: str) -> int | WrittenFloat:
    if text == "-0":  # an integer has no negative zero
        return WrittenFloat(text)
    try:
        return int(text)
    except ValueError as error:  # Python's limit
        raise DataError(f"has an integer of {len(text):,} digits; write it as a text") from error


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=WrittenFloat, parse_int=_integer, parse_constant=_constant
)


def number_text(number: int | float | decimal.Decimal) -> str:
    """Returns a number as text: its spelling in a JSON file, else the shortest decimal digits that mean it.

    Those have no exponent, and whole numbers no `.0`. Raises `DataError` for an infinite number.
    """
    if not math.isfinite(number):
        raise DataError("is infinite; accepted: text or a finite number")
    if isinstance(number, WrittenFloat):
        return number.text
    if isinstance(number, decimal.Decimal):
        return format(number, "f")
    if isinstance(number, float):
        digits = format(decimal.Decimal(repr(number)), "f")
        return digits.removesuffix(".0")
    return str(number)


def json_text(value: object) -> str:
    """Returns a cell's value as JSON, with numbers as `number_text` and dates as texts in ISO's form.

    Raises `DataError` for bytes and others that JSON does not have.
    """
    if value is None or isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float | decimal.Decimal):
        return number_text(value)
    if isinstance(value, datetime.date | datetime.time):
        return json.dumps(value.isoformat())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(json_text(entry) for entry in cast("Sequence[object]", value)) + "]"
    if is_mapping(value):
        entries = [f"{json.dumps(str(name), ensure_ascii=False)}: {json_text(entry)}" for name, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    raise DataError(f"holds a {type(value).__name__}; accepted: texts, numbers and lists of them")


def without_spelling(value: Any) -> Any:
    """Returns a cell's value with plain floats in place of `WrittenFloat`."""
    if isinstance(value, WrittenFloat):
        return float(value)
    if isinstance(value, list):
        return [without_spelling(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: without_spelling(entry) for name, entry in cast("Tree", value).items()}
    return value
