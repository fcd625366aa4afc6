"""Reads the problems of one source, and checks every row before heavy work begins."""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

import numpy
from numpy.typing import NDArray

from cepo.data.check_process import CheckSetup
from cepo.data.checking import checked_rows
from cepo.data.measures import RowMeasures
from cepo.data.prompts import Problem
from cepo.data.reading import read_source
from cepo.data.remembering import file_digests, identity_of, recall, remember
from cepo.data.row_parser import has_column, solution_of
from cepo.data.row_settings import ProblemRules
from cepo.data.rows import RowReader
from cepo.data.table import rows_of
from cepo.errors import ConfigError, DataError
from cepo.models.interface import ImageSource
from cepo.models.processing import Processing

logger = logging.getLogger(__name__)

WORTH_REMEMBERING_SECONDS = 1.0
"""The time of a check from which its results are remembered."""
_REASONS_SHOWN = 3


class ProblemSet(Sequence[Problem]):
    """Holds the usable rows of one source. Images are decoded on access and never kept.

    `rows` are converted rows of the source; by default it is read. Raises `ConfigError` if the source does not exist or
    lacks a column, and `DataError` if a row is bad or overlong and not to be skipped, or no row is usable.
    """

    def __init__(self, source: str, rules: ProblemRules, processing: Processing, *, rows: Any = None) -> None:
        self._source = source
        self._rules = rules
        self._processing = processing
        self._rows_are_given = rows is not None
        self._digests = file_digests(source) if rows is None else None  # before the files are opened
        self._rows = read_source(source) if rows is None else rows_of(rows)
        self._reader = RowReader(source, self._rows.column_names, rules.rows, processing)
        measures = self._measured()
        self._usable = self._usable_rows(measures)
        num_images = measures.num_images[self._usable]
        num_videos = measures.num_videos[self._usable]
        self.most_visuals: tuple[int, int] = (int(num_images.max()), int(num_videos.max()))
        # Other nodes get videos by value, and the images of such a row with them.
        has_images_alone = (num_images > 0) & (num_videos == 0)
        self._rows_with_images_alone = self._usable[has_images_alone]
        if self.skipped:
            logger.warning("%s: %d rows are used, left out: %s", source, len(self._usable), dict(self.skipped))

    def require_column(self, name: str) -> None:
        """Raises `ConfigError` if the source lacks the column that the setting `data.<name>` names."""
        self._reader.require_column(name)

    @property
    def column_names(self) -> list[str]:
        """The names of all columns of the source."""
        return self._rows.column_names

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
        keys = self._rules.rows.cells
        rows = self._rows.select_columns([keys.prompt_key, keys.answer_key])
        numbers: list[int] = self._usable.tolist()
        for number in numbers:
            values = tuple(rows[number].values())
            checksum = zlib.crc32(repr(values).encode("utf-8", "surrogatepass"), checksum)
        return f"{len(self)} rows, CRC-32 {checksum:08x}"

    def require_solutions(self) -> None:
        """Raises `ConfigError` if a usable row has no worked solution."""
        key = self._rules.rows.cells.solution_key
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

    def _measured(self) -> RowMeasures:
        """Returns the measures of all rows; those that are remembered and still hold are not measured again.

        Raises `DataError` at the first measured row that cannot be used and is not to be left out.
        """
        source = self._source
        num_rows = len(self._rows)
        identity = self._identity()
        recalled = None if identity is None else recall(identity, num_rows)
        measures = RowMeasures(num_rows) if recalled is None else recalled
        numbers = range(num_rows) if recalled is None else measures.stale_rows()
        if recalled is not None:
            stale = f"; {len(numbers)} are checked again, because images have changed" if numbers else ""
            logger.info("%s: the results of checking its %d rows are remembered%s", source, num_rows, stale)
        begin = time.monotonic()
        setup = CheckSetup(
            source=source,
            columns=self._rows.column_names,
            rules=self._rules.rows,
            processing=self._processing,
        )
        with closing(checked_rows(self._rows, numbers, self._reader, setup)) as checked:
            for number, row in checked:
                measures.put(number, row)
                self._refuse(number, measures)
                if row.measure is None:
                    logger.warning("%s, row %d is left out: %s", source, number, row.reason)
        took_long = time.monotonic() - begin > WORTH_REMEMBERING_SECONDS
        is_worth_remembering = len(numbers) > 0 and (recalled is not None or took_long)
        # Compared again, because a file that has changed meanwhile may have been read before or after the change.
        if is_worth_remembering and identity is not None and identity == self._identity():
            remember(identity, measures)
        if recalled is not None and measures.reasons:
            self._repeat_reasons(measures.reasons)
        return measures

    def _identity(self) -> str | None:
        if self._rows_are_given:
            return None
        return identity_of(self._source, self._rows, self._rules.rows, self._processing, before=self._digests)

    def _repeat_reasons(self, reasons: dict[int, str]) -> None:
        descriptions = [f"row {number}: {reason}" for number, reason in sorted(reasons.items())]
        if len(descriptions) > _REASONS_SHOWN:
            num_more = len(descriptions) - _REASONS_SHOWN
            descriptions = [*descriptions[:_REASONS_SHOWN], f"and {num_more} more"]
        logger.warning("%s: %d bad rows are left out: %s", self._source, len(reasons), "; ".join(descriptions))

    def _refuse(self, number: int, measures: RowMeasures) -> None:
        """Raises `DataError` if a row is bad or overlong and not to be left out."""
        rules = self._rules
        where = f"{self._source}, row {number}"
        reason = measures.reasons.get(number)
        if reason is not None and not rules.skip_bad_rows:
            raise DataError(f"{where}: {reason}. data.skip_bad_rows=true leaves such rows out")
        if measures.lengths[number] > rules.max_prompt_length and not rules.filter_overlong_prompts:
            raise DataError(
                f"{where}: the prompt has {measures[number]}; data.max_prompt_length is {rules.max_prompt_length}. "
                "data.filter_overlong_prompts=true leaves such rows out"
            )

    def _usable_rows(self, measures: RowMeasures) -> NDArray[numpy.int64]:
        """Returns the numbers of the rows that can be used, and counts in `skipped` those left out.

        Raises `DataError` if a row is not to be left out, or none remains.
        """
        limit = self._rules.max_prompt_length
        lengths = measures.lengths
        is_overlong = lengths > limit
        is_usable = (lengths >= 0) & ~is_overlong
        for number in numpy.flatnonzero(~is_usable).tolist():
            self._refuse(number, measures)
        overlong = numpy.flatnonzero(is_overlong)
        counts = {"bad": len(measures.reasons), "overlong": len(overlong)}
        self.skipped = Counter({reason: count for reason, count in counts.items() if count > 0})
        if not is_usable.any() and len(overlong):
            shortest = int(overlong[lengths[overlong].argmin()])
            longest = int(overlong[lengths[overlong].argmax()])
            raise DataError(
                f"{self._source}: all of its {len(overlong)} prompts are overlong: they have {lengths[shortest]} to "
                f"{measures[longest]}, and data.max_prompt_length={limit}. Raise it to {lengths[longest]} for all of them"
            )
        if not is_usable.any():
            why = " that can be used; the warnings above name each bad one" if self.skipped else ""
            raise DataError(f"{self._source} has no row{why}")
        return numpy.flatnonzero(is_usable)
