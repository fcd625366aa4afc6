"""Cells that hold a conversation or a list of images as a text: JSON, or what Python shows of them.

CSV files and data sets that went through one have such cells. They are read, or refused by what they are, and never taken
for a question or a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import cast

from cepo.data.json_text import read_literal
from cepo.errors import DataError
from cepo.files.trees import is_list, is_mapping

_BEGINS_WITH_BRACKET = re.compile(r"""\s*["']?\s*\w*\s*[\[({]""")
_HAS_ROLE = re.compile(r"""(["']|&quot;|\\")(role|from)\1\s*:|\brole=["']""")
_NOTHING = ("null", "None")
_SHOWN = 100


def written_messages(prompt: str) -> object:
    """Returns the messages that a prompt holds as a text; an ordinary prompt as it is.

    Raises `DataError` if the text is neither JSON nor a Python literal.
    """
    if not _BEGINS_WITH_BRACKET.match(prompt) or not _HAS_ROLE.search(prompt):
        return prompt
    try:
        value = read_literal(prompt)
        if isinstance(value, str):  # some texts were written twice
            value = read_literal(value)
    except DataError as error:
        if _is_question_about_json(prompt):
            return prompt
        raise DataError(
            f"holds messages as a text that {error}: {prompt[:_SHOWN]!r}. Store them as a list of {{role, content}}, or as JSON"
        ) from error
    messages = _messages_in(value)
    return prompt if messages is None else messages


def _messages_in(value: object) -> Sequence[object] | None:
    """Returns the messages that a value is: one of them, a list of them, or a mapping such as `{messages: [...]}`."""
    if is_mapping(value) and not _is_message(value):
        lists = [entry for entry in value.values() if is_list(entry)]
        return _messages_in(lists[0]) if len(lists) == 1 else None
    messages = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    return messages if any(_is_message(message) for message in messages) else None


def _is_message(value: object) -> bool:
    return is_mapping(value) and bool({"role", "from"} & value.keys()) and bool({"content", "value"} & value.keys())


def _is_question_about_json(prompt: str) -> bool:
    """Returns whether a text goes on behind the JSON with which it begins, and not with more of it."""
    start = prompt.lstrip()
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(start)
    except (ValueError, RecursionError):
        return False
    return start[end:].lstrip()[:1] not in ("", "{", "[", ",")


def written_parts(content: str) -> object:
    """Returns the parts of a message that its content holds as a text; an ordinary content as it is."""
    if not _BEGINS_WITH_BRACKET.match(content) or "type" not in content:
        return content
    try:
        value = read_literal(content)
    except DataError:
        return content
    is_parts = is_list(value) and value and all(is_mapping(part) and "type" in part for part in value)
    return value if is_parts else content


def written_values(values: Sequence[object]) -> list[object]:
    """Returns the images or videos of a cell, of which a text may hold one or several.

    Raises `DataError` if a text that is no path is neither JSON nor a Python literal.
    """
    result: list[object] = []
    for value in values:
        if isinstance(value, str) and value.strip() in _NOTHING:
            continue
        if isinstance(value, str) and _is_written(value.strip()):
            text = value
            try:
                value = read_literal(text)
                if isinstance(value, str) and _is_written(value):
                    value = read_literal(value)
            except DataError as error:
                raise DataError(f"holds a list as a text that {error}: {text[:_SHOWN]!r}") from error
        if isinstance(value, list | tuple):
            result += cast("Sequence[object]", value)
        else:
            result.append(value)
    return result


def _is_written(text: str) -> bool:
    """Returns whether a text is a list, a mapping, bytes or a text as JSON or Python writes them; a path never is."""
    ends_with_bracket = text.endswith(("]", "}", ")"))
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    is_bytes = text.startswith(("b'", 'b"')) and text[-1] == text[1]
    return is_quoted or is_bytes or (ends_with_bracket and _BEGINS_WITH_BRACKET.match(text) is not None)
