"""Reads the cell of a prompt: a text, or a conversation of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK
from cepo.trees import Fields, is_mapping

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


def plain_text(value: object) -> str:
    """Returns a cell as text: empty for None, and whole numbers without the `.0` of a float column."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_turns(prompt: Any) -> list[Turn]:
    """Returns the turns of a cell of the prompt column, which holds text or messages. The last turn is the question.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`.
    Image and video parts stand for the row's images and videos in order. Anything else raises `DataError`.
    """
    if not isinstance(prompt, list | tuple):
        return [Turn("user", plain_text(prompt))]
    if not prompt:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    turns = [_turn(message, number) for number, message in enumerate(cast("Sequence[object]", prompt))]
    if turns[-1].role != "user":
        raise DataError(f"the last message is the {turns[-1].role}'s; {_ACCEPTED}")
    return turns


def _turn(message: object, number: int) -> Turn:
    given: Fields = message if is_mapping(message) else {}
    content: object = given.get("content")
    if "role" not in given or not isinstance(content, str | list | tuple):
        raise DataError(f"message {number} has no role or no content of text or parts: {message!r:.200}; {_ACCEPTED}")
    if given["role"] not in ROLES:
        raise DataError(f"message {number} has the role {given['role']!r}; accepted: {', '.join(ROLES)}")
    parts = cast("Sequence[object]", [{"type": "text", "text": content}] if isinstance(content, str) else content)
    return Turn(given["role"], "".join(_part(part, number) for part in parts))


def _part(part: object, number: int) -> str:
    given: Fields = {key: value for key, value in part.items() if value is not None} if is_mapping(part) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return given["text"]
    if kind in ("image", "video") and len(given) == 1:
        return IMAGE_MARK if kind == "image" else VIDEO_MARK
    raise DataError(
        f"message {number} has the part {str(given or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key"
    )
