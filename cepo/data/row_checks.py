"""Checks before a run which rows of a source can be used (about 1 ms with an image), and reads prompts given as messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cepo.config.schema import DataConfig
from cepo.data.reading import read_row
from cepo.errors import DataError
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
    rows: Sequence[Mapping[str, object]],
    *,
    source: str,
    config: DataConfig,
    measure: Callable[[Mapping[str, object]], RowMeasure],
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
