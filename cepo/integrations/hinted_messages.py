"""Puts references into conversations as lists of messages, the form in which other trainers keep their prompts."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from cepo.algorithms.settings import TeacherConfig
from cepo.data.hints import HintTemplate
from cepo.errors import DataError
from cepo.types import Reference

Messages = Sequence[Mapping[str, Any]]
"""Turns with a `role` and a `content`, which is a text or a list of parts of the types `text` and `image`."""


_VISUALS = ("image", "video")


def teacher_messages(
    messages: Messages, reference: Reference | None, teacher: TeacherConfig, template: HintTemplate
) -> tuple[list[dict[str, Any]], str]:
    """Returns the conversation that a teacher reads, and the text after its assistant header.

    The reference is added to the last user turn's last text, or with `assistant_prefix` it is that text. None gives the
    student's conversation. A blind teacher, and with a reference one without `with_images`, sees no images.
    """
    turns, prefix = [dict(turn) for turn in messages], ""
    if reference is None:
        return turns, prefix
    if reference.blind or not teacher.with_images:
        turns = [turn | {"content": _without_images(turn.get("content"))} for turn in turns]
    if reference.text is not None and teacher.placement == "assistant_prefix":
        prefix = template.render(prompt="", reference=reference.text)
    elif reference.text is not None:
        turn = next(turn for turn in reversed(turns) if turn["role"] == "user")
        if isinstance(turn["content"], str):
            turn["content"] = template.render(prompt=turn["content"], reference=reference.text)
        else:
            turn["content"] = [dict(part) for part in turn["content"]]
            part = next(part for part in reversed(turn["content"]) if part["type"] == "text")
            part["text"] = template.render(prompt=part["text"], reference=reference.text)
    return turns, prefix


def spliced(
    prompt: Sequence[int], student: Sequence[int], teacher: Sequence[int], placeholders: Container[int]
) -> list[int]:
    """Returns a teacher's prompt whose images are expanded as in `prompt`.

    `student` and `teacher` are conversations with one of the `placeholders` for each image; `prompt` is the student's
    with as many as the image has features. All up to their first difference is taken from `prompt`.

    Raises:
        DataError: an image comes after that difference, or `prompt` does not end as `student` does.
    """
    pairs = enumerate(zip(student, teacher, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(student), len(teacher)))
    rest = list(student[same:])
    kept = len(prompt) - len(rest)
    if list(prompt[kept:]) != rest or any(token in placeholders for token in rest):
        raise DataError(
            "a reference cannot be put into a prompt: either an image comes after the text that the reference is added "
            "to, or the prompt does not end as the chat template renders it, because it was cut or rendered otherwise"
        )
    return [*prompt[:kept], *teacher[same:]]


def images_of(messages: Messages) -> list[Any]:
    """Returns the images of a conversation, in their order."""
    contents = [turn["content"] for turn in messages if isinstance(turn.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _without_images(content: Any) -> Any:
    return [part for part in content if part["type"] not in _VISUALS] if isinstance(content, list) else content
