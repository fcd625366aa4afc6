"""Reads prompts given as chat messages: a list of {role, content} in the prompt column instead of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


def is_conversation(value: Any) -> bool:
    """Returns whether a cell of the prompt column holds messages."""
    return isinstance(value, list | tuple)


def read_conversation(messages: Any) -> list[Turn]:
    """Returns the turns of a cell's messages. The last one is the question.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`.
    Image and video parts stand for the row's images and videos in their order.

    Raises:
        DataError: there are no messages, a role or part is unknown, or the last turn is not the user's.
    """
    if not messages:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    turns = [_turn(message, number) for number, message in enumerate(messages)]
    if turns[-1].role != "user":
        raise DataError(f"the last message is the {turns[-1].role}'s; {_ACCEPTED}")
    return turns


def _turn(message: Any, number: int) -> Turn:
    if not isinstance(message, Mapping) or message.get("content") is None or "role" not in message:
        found = f"the keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        raise DataError(f"message {number} has no role or no content (it is: {found}); {_ACCEPTED}")
    if message["role"] not in ROLES:
        raise DataError(f"message {number} has the role {message['role']!r}; accepted: {', '.join(ROLES)}")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise DataError(
            f"message {number} has a {type(content).__name__} as content; accepted: text or a list of parts"
        )
    return Turn(message["role"], "".join(_part(part, number) for part in parts))


def _part(part: Any, number: int) -> str:
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return given["text"]
    if kind in ("image", "video") and len(given) == 1:
        return IMAGE_MARK if kind == "image" else VIDEO_MARK
    raise DataError(
        f"message {number} has the part {str(given or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key"
    )
