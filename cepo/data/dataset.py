"""Reads the problems of one source, and checks every row before heavy work begins."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import numpy
from numpy.typing import NDArray

from cepo.data.fingerprint import identity_of
from cepo.data.prompts import Problem
from cepo.data.row_check import RowCheck, RowStats, checked_rows
from cepo.data.row_parser import has_column, solution_of
from cepo.data.row_settings import RowRules
from cepo.data.rows import RowReader
from cepo.data.tables import read_source, rows_of
from cepo.errors import ConfigError, DataError
from cepo.models.interface import ImageSource
from cepo.models.processing import Processing
from cepo.rewards.samples import require_free_names

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig

logger = logging.getLogger(__name__)

_REASONS_SHOWN = 10


class ProblemSet(Sequence[Problem]):
    """Holds the usable rows of one source. Images are decoded on access and never kept.

    `config` says how rows are read, and which of them are used: `rules` and the longest prompt. `rows` are those of the
    source as a program made them; by default it is read. Raises `ConfigError` if the source does not exist, lacks a column,
    or has one under a name of the trainer's, and `DataError` if a row is bad or overlong and not to be skipped, or no row is
    usable.
    """

    def __init__(self, source: str, config: DataConfig, processing: Processing, *, rows: Any = None) -> None:
        self._source = source
        self._config = config
        self.rules = RowRules.of(config)
        self._processing = processing
        self._rows_are_given = rows is not None
        self._rows = read_source(source) if rows is None else rows_of(rows)
        self._reader = RowReader(source, self._rows.column_names, self.rules, processing)
        self._stats = self._checked()
        self._usable = self._usable_rows()
        num_images = self._stats.measures["num_images"][self._usable]
        num_videos = self._stats.measures["num_videos"][self._usable]
        self.most_visuals: tuple[int, int] = (int(num_images.max()), int(num_videos.max()))
        if self.most_visuals == (0, 0):
            self._check_column_of_images()
        if rows is None:
            require_free_names(source, self._rows.column_names, self.rules.cells.columns)
        # Other nodes get videos by value, and the images of such a row with them.
        has_images_alone = (num_images > 0) & (num_videos == 0)
        self._rows_with_images_alone = self._usable[has_images_alone]
        if self.skipped:
            logger.warning("%s: %d rows are used, left out: %s", source, len(self._usable), dict(self.skipped))

    def require_column(self, name: str) -> None:
        """Raises `ConfigError` if the source lacks the column that the setting `data.<name>` names."""
        self._reader.require_column(name)

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            numbers = range(len(self))[cast("slice[int, int, int]", index)]
            return [self[number] for number in numbers]
        number = int(self._usable[cast(int, index)])
        source = None if self._rows_are_given else ImageSource(data=self._source, row=number)
        try:
            return self._reader.problem(number, self._rows[number], source)
        except DataError as error:  # a file that has changed since the check
            raise DataError(f"{self._source}, row {number}: {error}") from error

    def content(self) -> str:
        """Describes the usable rows by their number and a CRC-32 of prompts and answers, without images."""
        checksum = 0
        keys = self.rules.cells
        rows = self._rows.select_columns([keys.prompt_key, keys.answer_key])
        numbers: list[int] = self._usable.tolist()
        for number in numbers:
            values = tuple(rows[number].values())
            checksum = zlib.crc32(repr(values).encode("utf-8", "surrogatepass"), checksum)
        return f"{len(self)} rows, CRC-32 {checksum:08x}"

    def require_solutions(self) -> None:
        """Raises `ConfigError` if a usable row has no worked solution."""
        key = self.rules.cells.solution_key
        names = self._rows.column_names
        rows_without: Sequence[int] = self._usable.tolist()
        column = f"no column '{key}'"
        if has_column(names, key):
            column = f"column '{key}'"
            rows = self._rows.select_columns([key])
            rows_without = [number for number in rows_without if solution_of(rows[number], key) is None]
        if rows_without:
            raise ConfigError(
                f"algorithm.positive.source=solution shows worked solutions, but {len(rows_without)} of {len(self)} rows of "
                f"{self._source} have none ({column}), the first of them row {rows_without[0]}; name the column in "
                "data.solution_key (there are "
                f"{', '.join(names)}), or choose solution_or_answer or another source"
            )

    def image_probe(self) -> ImageSource | None:
        """Returns a row with images, with which other nodes test whether they can read them; None if there is none.

        Nothing is decoded. Rows with videos are skipped, because their content is sent by value.
        """
        if self._rows_are_given or len(self._rows_with_images_alone) == 0:
            return None
        return ImageSource(data=self._source, row=int(self._rows_with_images_alone[0]))

    def _check_column_of_images(self) -> None:
        """Names the column of images that a source without any image lacks, of which a text says nothing without marks.

        Raises `ConfigError` if `data.image_marks=front` says that the questions have images.
        """
        key = self.rules.cells.image_key
        names = self._rows.column_names
        if has_column(names, key) or self._processing.images is None:
            return
        if self.rules.cells.puts_marks_in_front:
            self.require_column("image_key")
        logger.warning(
            "%s: no question has an image: data.image_key is '%s', and the columns are %s",
            self._source, key, ", ".join(names),
        )  # fmt: skip

    def _checked(self) -> RowStats:
        """Returns what the check of all rows finds; raises `DataError` if one cannot be used and is not to be left out."""
        check = RowCheck(
            source=self._source,
            rows=self._rows,
            reader=self._reader,
            identity=identity_of(self._source, self._rows, self.rules, self._processing),
        )
        stats = RowStats(len(self._rows))
        with closing(checked_rows(check)) as results:
            for results_of_task in results:
                for numbers, checked in results_of_task:
                    stats.put(numbers, checked)
                for number in results_of_task[0][0]:
                    self._refuse(number, stats)
        if stats.reasons:
            reasons = [f"row {number}: {reason}" for number, reason in sorted(stats.reasons.items())]
            if len(reasons) > _REASONS_SHOWN:
                reasons = [*reasons[:_REASONS_SHOWN], f"and {len(reasons) - _REASONS_SHOWN} more"]
            logger.warning("%s: %d bad rows are left out: %s", self._source, len(stats.reasons), "; ".join(reasons))
        return stats

    def _refuse(self, number: int, stats: RowStats) -> None:
        """Raises `DataError` if a row is bad or overlong and not to be left out."""
        config = self._config
        where = f"{self._source}, row {number}"
        reason = stats.reasons.get(number)
        if reason is not None and not config.skip_bad_rows:
            raise DataError(f"{where}: {reason}. data.skip_bad_rows=true leaves such rows out")
        if stats.lengths[number] > config.max_prompt_length and not config.filter_overlong_prompts:
            raise DataError(
                f"{where}: the prompt has {stats[number]}; data.max_prompt_length is {config.max_prompt_length}. "
                "data.filter_overlong_prompts=true leaves such rows out"
            )

    def _usable_rows(self) -> NDArray[numpy.int64]:
        """Returns the numbers of the rows that can be used, and counts in `skipped` those left out.

        Raises `DataError` if none remains.
        """
        limit = self._config.max_prompt_length
        lengths = self._stats.lengths
        is_overlong = lengths > limit
        is_usable = (lengths >= 0) & ~is_overlong
        overlong = numpy.flatnonzero(is_overlong)
        counts = {"bad": len(self._stats.reasons), "overlong": len(overlong)}
        self.skipped = Counter({reason: count for reason, count in counts.items() if count > 0})
        if not is_usable.any() and len(overlong):
            shortest = int(overlong[lengths[overlong].argmin()])
            longest = int(overlong[lengths[overlong].argmax()])
            raise DataError(
                f"{self._source}: all of its {len(overlong)} prompts are overlong: they have {lengths[shortest]} to "
                f"{self._stats[longest]}, and data.max_prompt_length={limit}. Raise it to {lengths[longest]} for all of them"
            )
        if not is_usable.any():
            why = " that can be used; the warnings above say why" if self.skipped else ""
            raise DataError(f"{self._source} has no row{why}")
        return numpy.flatnonzero(is_usable)
