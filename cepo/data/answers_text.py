"""Reads the right answer and the worked solution of a row that another trainer gives, as the texts that teachers read."""

from __future__ import annotations

import json
from typing import Any, cast

from cepo.data.cells import cell_text
from cepo.errors import DataError
from cepo.files.trees import Fields, is_dict, is_list, is_mapping


def answer_text(value: object, where: str) -> str:
    """Returns a cell with the right answer as one text.

    A list with one answer is that answer, as a cell without a list would be; several answers are their JSON text, and
    so is a mapping. Numbers are written as in `cell_text`. Raises `DataError`, which names the cell by `where`, if
    there is no answer, or one that is neither text, number nor a list or mapping of them.
    """
    single = _without_list_of_one(_plain(value))
    is_container = is_list(single) or is_dict(single)
    if single and is_container:
        return _json_of(single, where)
    text = "" if is_container else cell_text(single, where).strip()
    if not text:
        raise DataError(f"{where} is empty ({value!r:.100}); teachers need a right answer for each row")
    return text


def solution_text(value: object, where: str) -> str | None:
    """Returns a cell with a worked solution as one text, by the rules of `answer_text`; None for an empty cell."""
    single = _without_list_of_one(_plain(value))
    is_container = is_list(single) or is_dict(single)
    is_empty = not single if is_container else not cell_text(single, where).strip()
    return None if is_empty else answer_text(single, where)


def _plain(value: object) -> object:
    """Returns an array or scalar of numpy or torch as Python's own value, and a tuple as a list."""
    convert: Any = getattr(value, "tolist", None)
    if convert is not None:
        return convert()
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value


def _without_list_of_one(value: object) -> object:
    single = value
    while is_list(single) and len(single) == 1:
        single = _plain(single[0])
    return single


def _json_of(value: object, where: str) -> str:
    try:
        return json.dumps(_written(value), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} holds {value!r:.100}, which is no answer as text: {error}") from error


def _written(value: object) -> object:
    """Returns a value with whole numbers as integers, also those that a column of floats has as `15.0`."""
    plain = _plain(value)
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    if is_list(plain):
        return [_written(part) for part in plain]
    if is_mapping(plain):
        fields: Fields = plain
        return {name: _written(part) for name, part in fields.items()}
    return plain
