"""Reads prompts given as chat messages: lists of {role, content} in the prompt column instead of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


def is_conversation(value: Any) -> bool:
    """Returns whether a cell of the prompt column holds messages."""
    return isinstance(value, list | tuple)


def read_conversation(messages: Any) -> list[Turn]:
    """Returns the turns of a cell's messages. The last turn is the question.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`.
    Image and video parts stand for the row's images and videos in order.

    Raises:
        DataError: there are no messages, a role or part is unknown, or the last turn is not the user's.
    """
    if not messages:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    turns = [_turn(message, number) for number, message in enumerate(messages)]
    if turns[-1].role != "user":
        raise DataError(f"the last message is the {turns[-1].role}'s; {_ACCEPTED}")
    return turns


def _mapping(value: object) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _turn(message: object, number: int) -> Turn:
    given = _mapping(message)
    if given is None or given.get("content") is None or "role" not in given:
        found = type(message).__name__ if given is None else f"the keys {', '.join(map(str, given))}"
        raise DataError(f"message {number} has no role or no content (it is: {found}); {_ACCEPTED}")
    if given["role"] not in ROLES:
        raise DataError(f"message {number} has the role {given['role']!r}; accepted: {', '.join(ROLES)}")
    content: Any = given["content"]
    if not isinstance(content, str | list | tuple):
        raise DataError(
            f"message {number} has a {type(content).__name__} as content; accepted: text or a list of parts"
        )
    parts: list[object] = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    return Turn(given["role"], "".join(_part(part, number) for part in parts))


def _part(part: object, number: int) -> str:
    given = {key: value for key, value in (_mapping(part) or {}).items() if value is not None}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return given["text"]
    if kind in ("image", "video") and len(given) == 1:
        return IMAGE_MARK if kind == "image" else VIDEO_MARK
    raise DataError(
        f"message {number} has the part {str(given or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key"
    )
