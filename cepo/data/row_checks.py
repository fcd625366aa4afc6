"""Checks before a run which rows of a source can be used (about 1 ms with an image), and reads prompts given as messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cepo.config.schema import DataConfig
from cepo.data.reading import read_row
from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK
from cepo.progress import shown
from cepo.trees import Fields, is_mapping

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """The number of tokens of a row's prompt, including `visual_tokens` of images and videos, and their numbers."""

    length: int
    num_images: int
    num_videos: int = 0
    visual_tokens: int = 0

    def __str__(self) -> str:
        visual = f" ({self.visual_tokens} of them of images and videos)" if self.visual_tokens else ""
        return f"{self.length} tokens{visual}"


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """The outcome of checking a source: the usable rows' numbers, and their largest numbers of images and videos."""

    usable: Sequence[int]
    skipped: Counter[str]
    """How many rows were left out as `bad` and as `overlong`."""
    most_images: int
    most_videos: int


def check_rows(
    rows: Sequence[Mapping[str, object]],
    *,
    source: str,
    config: DataConfig,
    measure: Callable[[Mapping[str, object]], RowMeasure],
) -> RowChecks:
    """Applies `measure` to every row.

    Raises:
        DataError: a row is bad without `data.skip_bad_rows`, or overlong without `data.filter_overlong_prompts`, or no
            row can be used.
    """
    usable: dict[int, RowMeasure] = {}
    overlong: list[RowMeasure] = []
    limit = config.max_prompt_length
    for number in shown(range(len(rows)), f"checking {source}", len(rows)):
        try:
            measured = measure(read_row(rows, number))
        except DataError as error:
            if not config.skip_bad_rows:
                remedy = "data.skip_bad_rows=true leaves such rows out"
                raise DataError(f"{source}, row {number}: {error}. {remedy}") from error
            logger.warning("%s, row %d is left out: %s", source, number, error)
            continue
        if measured.length <= limit:
            usable[number] = measured
        elif config.filter_overlong_prompts:
            overlong.append(measured)
        else:
            raise DataError(
                f"{source}, row {number}: the prompt has {measured}; data.max_prompt_length is {limit}. "
                "data.filter_overlong_prompts=true leaves such rows out"
            )
    num_bad = len(rows) - len(usable) - len(overlong)
    if not usable:
        raise DataError(f"{source}{_why_none_is_usable(num_bad, overlong, config)}")
    return RowChecks(
        usable=list(usable),
        skipped=+Counter(bad=num_bad, overlong=len(overlong)),
        most_images=max(measured.num_images for measured in usable.values()),
        most_videos=max(measured.num_videos for measured in usable.values()),
    )


def _why_none_is_usable(num_bad: int, overlong: Sequence[RowMeasure], config: DataConfig) -> str:
    if not overlong:
        return " has no row that can be used; the warnings above name each bad one" if num_bad else " has no row"
    shortest, longest = (choose(overlong, key=lambda measured: measured.length) for choose in (min, max))
    bad = f" ({num_bad} more rows are bad)" if num_bad else ""
    text = (
        f": all of its {len(overlong)} prompts{bad} are overlong: they have {shortest.length} to {longest}, and "
        f"data.max_prompt_length={config.max_prompt_length}. Raise it to {longest.length} for all of them"
    )
    if shortest.visual_tokens and config.min_pixels is not None:
        text += (
            f". Images of fewer pixels than data.min_pixels={config.min_pixels} are enlarged to that many; "
            "data.min_pixels=null leaves them as they are"
        )
    return text


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
