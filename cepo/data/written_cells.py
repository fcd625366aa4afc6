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

_BEGINS_WITH_BRACKET = re.compile(r"""(?:```\w*)?[\s\ufeff"'\\]*(?:-\s|(?:\w+\s*[:=]?\s*)?[\[({])""")
_QUOTES = r"(?:[^\w:=,]|&\w+;|&#\d+;)*"
_HAS_MESSAGE = re.compile(
    r"""(["'])(?:role|from)\1\s*:"""
    rf"|(?<!\w)(?:role|from|speaker){_QUOTES}[:=,]{_QUOTES}(?:role\.)?"
    r"(?:system|developer|user|human|assistant|gpt|tool)\b(?! +\w)",
    re.IGNORECASE,
)
"""A role, however its quotation marks are written; a question that begins with a bracket has none."""
_HAS_CONTENT = re.compile(rf"(?<!\w)(?:content|value|text){_QUOTES}[:=,]", re.IGNORECASE)
_MOST_WRITINGS = 3
_DEEPEST = 4
_NOTHING = ("null", "None")
_SHOWN = 100


def written_messages(prompt: str) -> object:
    """Returns the messages that a prompt holds as a text; an ordinary prompt as it is.

    Raises `DataError` if the text has a role and a content, and is neither JSON nor a Python literal of messages.
    """
    if not _BEGINS_WITH_BRACKET.match(prompt) or not _HAS_MESSAGE.search(prompt) or not _HAS_CONTENT.search(prompt):
        return prompt
    try:
        value = _read_repeatedly(prompt.strip("\ufeff"))
    except DataError as error:
        if _is_question_about_json(prompt):
            return prompt
        reason = str(error)
    else:
        messages = _messages_in(value)
        if messages:
            return messages
        reason = "has no list of {role, content}, or several"
    raise DataError(
        f"holds messages as a text that {reason}: {prompt[:_SHOWN]!r}. Store them as a list of {{role, content}}, or as JSON"
    )


def _read_repeatedly(text: str) -> object:
    """Returns what a text holds that was written as a text several times."""
    value: object = text
    for _ in range(_MOST_WRITINGS):
        if isinstance(value, str):
            value = read_literal(value)
    return value


def _messages_in(value: object, depth: int = 0) -> Sequence[object]:
    """Returns the messages that a value is or has: one, a list of them, or a mapping or list with one such list; else none."""
    if depth > _DEEPEST:
        return []
    if _is_message(value):
        return [value]
    if is_mapping(value):
        entries = list(value.values())
    elif isinstance(value, list | tuple):
        entries = list(cast("Sequence[object]", value))
        if any(map(_is_message, entries)):
            return entries
    else:
        return []
    found = [messages for messages in (_messages_in(entry, depth + 1) for entry in entries) if messages]
    return found[0] if len(found) == 1 else []


def _is_message(value: object) -> bool:
    return is_mapping(value) and bool({"role", "from"} & value.keys()) and bool({"content", "value"} & value.keys())


def _is_question_about_json(prompt: str) -> bool:
    """Returns whether a text goes on in words behind the JSON with which it begins, and not with more of it."""
    start = re.search(r"[\[{]", prompt)
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(prompt, start.start() if start else 0)
    except (ValueError, RecursionError):
        return False
    behind = prompt[end:].lstrip()
    return re.search(r"\w", behind) is not None and behind[0] not in "{[,"


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
