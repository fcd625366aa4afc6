"""Checks before a run which rows of a source can be used (about 1 ms with an image), and reads prompts given as messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cepo.config.schema import DataConfig
from cepo.data.reading import read_row
from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK
from cepo.progress import shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """The outcome of checking a source.

    Attributes:
        num_rows: number of rows of the source.
        bad: numbers of the rows left out for an error.
        overlong: the rows left out for their length, by number.
        most_images, most_videos: the most images and videos in a usable row.
    """

    num_rows: int
    bad: Sequence[int]
    overlong: Mapping[int, RowMeasure]
    most_images: int
    most_videos: int

    @property
    def usable(self) -> list[int]:
        """The numbers of the rows that can be used."""
        left_out = {*self.bad, *self.overlong}
        return [number for number in range(self.num_rows) if number not in left_out]


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """The number of tokens of a row's prompt, including `visual_tokens` of images and videos, and their numbers."""

    length: int
    num_images: int
    num_videos: int = 0
    visual_tokens: int = 0


def check_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    source: str,
    config: DataConfig,
    measure: Callable[[Mapping[str, Any]], RowMeasure],
) -> RowChecks:
    """Applies `measure` to every row.

    Raises:
        DataError: a row is bad without `data.skip_bad_rows`, or overlong without `data.filter_overlong_prompts`.
    """
    bad: list[int] = []
    overlong: dict[int, RowMeasure] = {}
    most_images = most_videos = 0
    for number in shown(range(len(rows)), f"checking {source}", len(rows)):
        try:
            measured = measure(read_row(rows, number))
        except DataError as error:
            if not config.skip_bad_rows:
                raise DataError(
                    f"{source}, row {number}: {error}. data.skip_bad_rows=true leaves such rows out"
                ) from error
            bad.append(number)
            logger.warning("%s, row %d is left out: %s", source, number, error)
            continue
        if measured.length > config.max_prompt_length:
            if not config.filter_overlong_prompts:
                raise DataError(
                    f"{source}, row {number}: the prompt has {measured.length} tokens{_of_images(measured.visual_tokens)}; "
                    f"data.max_prompt_length is {config.max_prompt_length}. data.filter_overlong_prompts=true leaves such "
                    "rows out"
                )
            overlong[number] = measured
            continue
        most_images = max(most_images, measured.num_images)
        most_videos = max(most_videos, measured.num_videos)
    return RowChecks(num_rows=len(rows), bad=bad, overlong=overlong, most_images=most_images, most_videos=most_videos)


def why_none_is_usable(checks: RowChecks, source: str, config: DataConfig) -> str:
    """Returns the error text for a source without a usable row."""
    limit = config.max_prompt_length
    if not checks.num_rows:
        return f"{source} has no row; accepted: at least one problem"
    if checks.bad:
        left_out = f"{len(checks.bad)} bad and {len(checks.overlong)} longer than data.max_prompt_length={limit} tokens"
        return f"{source}: none of its {checks.num_rows} rows can be used: {left_out}. The warnings above name each bad one"
    by_length = sorted(checks.overlong.values(), key=lambda measured: measured.length)
    shortest, longest = by_length[0], by_length[-1]
    enlarged = (
        f". Images of fewer pixels than data.min_pixels={config.min_pixels} are enlarged to that many; "
        "data.min_pixels=null leaves them as they are"
    )
    return (
        f"{source}: all of its {checks.num_rows} prompts are overlong: they have {shortest.length} to "
        f"{longest.length} tokens{_of_images(shortest.visual_tokens, 'in the shortest ')}, and "
        f"data.max_prompt_length={limit}. Raise it to {longest.length} for all of them"
        + (enlarged if shortest.visual_tokens and config.min_pixels is not None else "")
    )


def _of_images(tokens: int, where: str = "") -> str:
    return f" ({where}{tokens} of them of images and videos)" if tokens else ""


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
