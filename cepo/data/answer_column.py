"""Reads the right answer and the worked solution of a row that another trainer gives, as the texts that teachers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cepo.data.json_text import json_text
from cepo.data.row_parser import cell_text, without_list_of_one
from cepo.errors import DataError
from cepo.files.trees import is_dict, is_list, is_mapping


def answer_text(value: object, where: str) -> str:
    """Returns a cell with the right answer as one text.

    A list with one answer is that answer, as a cell without a list would be; several answers are their JSON text, and
    so is a mapping (`json_text`). Raises `DataError`, which names the cell by `where`, if there is no answer, or one
    that is neither text, number, date nor a list or mapping of them.
    """
    single = without_list_of_one(_plain(value))
    is_container = is_list(single) or is_dict(single)
    if single and is_container:
        return _json_of(single, where)
    text = "" if is_container else cell_text(single, where).strip()
    if not text:
        raise DataError(f"{where} is empty ({value!r:.100}); teachers need a right answer for each row")
    return text


def solution_text(value: object, where: str) -> str | None:
    """Returns a cell with a worked solution as one text, by the rules of `answer_text`; None for an empty cell."""
    single = without_list_of_one(_plain(value))
    is_container = is_list(single) or is_dict(single)
    is_empty = not single if is_container else not cell_text(single, where).strip()
    return None if is_empty else answer_text(single, where)


def _plain(value: object) -> object:
    """Returns a value with Python's own in place of arrays and scalars of numpy or torch, and lists for tuples, at any depth."""
    convert: Any = getattr(value, "tolist", None)
    if convert is not None:
        return _plain(convert())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast("Sequence[object]", value)]
    if is_mapping(value):
        return {name: _plain(entry) for name, entry in value.items()}
    return value


def _json_of(value: object, where: str) -> str:
    try:
        return json_text(value)
    except DataError as error:
        raise DataError(f"{where} {error}") from error
