"""Reads the problems of one source, and checks every row before heavy work begins."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from cepo.config.schema import DataConfig
from cepo.data.contexts import Problem
from cepo.data.images import listed
from cepo.data.reading import read_row, read_source, without_decoding
from cepo.data.rows import RowMeasure, RowReader, worked_solution
from cepo.errors import ConfigError, DataError
from cepo.models.inputs import ImageSource
from cepo.models.processing import Processing
from cepo.progress import shown

logger = logging.getLogger(__name__)


class ProblemSet(Sequence[Problem]):
    """Holds the usable rows of one source. Images are decoded on access and never kept.

    `rows` are converted rows of the source; by default it is read. Raises `ConfigError` if the source does not exist or
    lacks a column, and `DataError` if a row is bad or overlong and not to be skipped, or no row is usable.
    """

    def __init__(self, source: str, config: DataConfig, processing: Processing, *, rows: Any = None) -> None:
        self._source, self._config = source, config
        self._rows_are_given = rows is not None
        read = read_source(source, text_columns=(config.prompt_key, config.answer_key)) if rows is None else rows
        self._rows = without_decoding(read)
        self._reader = RowReader(source, self._rows.column_names, config, processing)
        usable = self._usable_rows()
        self._usable = list(usable)
        images, videos = zip(*((each.num_images, each.num_videos) for each in usable.values()), strict=True)
        self.most_visuals: tuple[int, int] = max(images), max(videos)
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
            return [self[i] for i in range(len(self))[cast("slice[int, int, int]", index)]]
        number = self._usable[cast(int, index)]
        source = None if self._rows_are_given else ImageSource(data=self._source, row=number)
        return self._reader.problem(number, self._rows[number], source)

    def content(self) -> str:
        """Describes the usable rows by their number and a CRC-32 of prompts and answers, without images."""
        texts = self._rows.select_columns([self._config.prompt_key, self._config.answer_key]).select(self._usable)
        total = 0
        for row in texts:
            total = zlib.crc32(repr(tuple(row.values())).encode("utf-8", "surrogatepass"), total)
        return f"{len(self)} rows, CRC-32 {total:08x}"

    def require_solutions(self) -> None:
        """Raises `ConfigError` if a usable row has no worked solution."""
        key, names = self._config.solution_key, self._rows.column_names
        missing: Sequence[int] = self._usable
        if key in names:
            solutions = self._rows.select_columns(key)
            missing = [row for row in self._usable if worked_solution(solutions[row][key]) is None]
        if missing:
            raise ConfigError(
                f"algorithm.positive.source=solution shows worked solutions, but {len(missing)} of {len(self)} rows of "
                f"{self._source} have none ({'' if key in names else 'no '}column '{key}'), the first of them row "
                f"{missing[0]}; name the column in data.solution_key (there are "
                f"{', '.join(names)}), or choose solution_or_answer or another source"
            )

    def image_probe(self) -> ImageSource | None:
        """Returns a row with images, with which other nodes test whether they can read them; None if there is none.

        Nothing is decoded. Rows with videos are skipped, because their content is sent by value.
        """
        most_images, _ = self.most_visuals
        for number in self._usable if most_images and not self._rows_are_given else ():
            row = self._rows[number]
            if listed(row, self._config.image_key) and not listed(row, self._config.video_key):
                return ImageSource(data=self._source, row=number)
        return None

    def _usable_rows(self) -> dict[int, RowMeasure]:
        """Returns the measures of the rows that can be used by number, and counts in `skipped` those left out.

        A row takes about 1 ms with an image.
        """
        config, limit = self._config, self._config.max_prompt_length
        usable: dict[int, RowMeasure] = {}
        overlong: list[RowMeasure] = []
        for number in shown(range(len(self._rows)), f"checking {self._source}", len(self._rows)):
            where = f"{self._source}, row {number}"
            try:
                measured = self._reader.measure(read_row(self._rows, number))
            except DataError as error:
                if not config.skip_bad_rows:
                    raise DataError(f"{where}: {error}. data.skip_bad_rows=true leaves such rows out") from error
                logger.warning("%s is left out: %s", where, error)
                continue
            if measured.length <= limit:
                usable[number] = measured
            elif config.filter_overlong_prompts:
                overlong.append(measured)
            else:
                raise DataError(
                    f"{where}: the prompt has {measured}; data.max_prompt_length is {limit}. "
                    "data.filter_overlong_prompts=true leaves such rows out"
                )
        self.skipped = +Counter(bad=len(self._rows) - len(usable) - len(overlong), overlong=len(overlong))
        if overlong and not usable:
            shortest, longest = (choose(overlong, key=lambda measured: measured.length) for choose in (min, max))
            raise DataError(
                f"{self._source}: all of its {len(overlong)} prompts are overlong: they have {shortest.length} to "
                f"{longest}, and data.max_prompt_length={limit}. Raise it to {longest.length} for all of them"
            )
        if not usable:
            why = " that can be used; the warnings above name each bad one" if self.skipped else ""
            raise DataError(f"{self._source} has no row{why}")
        return usable
