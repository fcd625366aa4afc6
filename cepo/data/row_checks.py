"""Checks before a run which rows of a source can be used (about 1 ms with an image)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cepo.config.schema import DataConfig
from cepo.data.reading import read_row
from cepo.errors import DataError
from cepo.progress import shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """The number of tokens of a row's prompt, including `visual_tokens` of images and videos, and their numbers."""

    length: int
    num_images: int
    num_videos: int = 0
    visual_tokens: int = 0

    def __str__(self) -> str:
        visual = f" ({self.visual_tokens} of them of images and videos, which data.min_pixels and max_pixels bound)"
        return f"{self.length} tokens{visual if self.visual_tokens else ''}"


def check_rows(
    rows: Sequence[Mapping[str, object]],
    *,
    source: str,
    config: DataConfig,
    measure: Callable[[Mapping[str, object]], RowMeasure],
) -> tuple[dict[int, RowMeasure], Counter[str]]:
    """Returns the measures of the usable rows by number, and how many were left out as `bad` and as `overlong`.

    Raises `DataError` for a bad row without `data.skip_bad_rows`, for an overlong one without
    `data.filter_overlong_prompts`, and if no row can be used.
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
        raise DataError(f"{source}{_why_none_is_usable(num_bad, overlong, limit)}")
    return usable, +Counter(bad=num_bad, overlong=len(overlong))


def _why_none_is_usable(num_bad: int, overlong: Sequence[RowMeasure], limit: int) -> str:
    if not overlong:
        return " has no row that can be used; the warnings above name each bad one" if num_bad else " has no row"
    shortest, longest = (choose(overlong, key=lambda measured: measured.length) for choose in (min, max))
    return (
        f": all of its {len(overlong)} prompts are overlong: they have {shortest.length} to {longest}, and "
        f"data.max_prompt_length={limit}. Raise it to {longest.length} for all of them"
    )
