"""What a check found of all rows of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from cepo.data.rows import RowMeasure

_BAD = -1


class RowStats:
    """The measures of a source's rows: arrays with an entry for each row, of which those of bad rows are 0.

    Attributes:
        lengths: (rows,) int32, the tokens of each prompt; -1 for a bad row.
        num_images, num_videos, visual_tokens: (rows,) int32.
        reasons: why a row is bad, by number.
    """

    def __init__(self, num_rows: int) -> None:
        self.lengths = numpy.full(num_rows, _BAD, dtype=numpy.int32)
        self.num_images = numpy.zeros(num_rows, dtype=numpy.int32)
        self.num_videos = numpy.zeros(num_rows, dtype=numpy.int32)
        self.visual_tokens = numpy.zeros(num_rows, dtype=numpy.int32)
        self.reasons: dict[int, str] = {}

    def __getitem__(self, number: int) -> RowMeasure:
        """Returns the measure of a row that is not bad."""
        return RowMeasure(
            length=int(self.lengths[number]),
            num_images=int(self.num_images[number]),
            num_videos=int(self.num_videos[number]),
            visual_tokens=int(self.visual_tokens[number]),
        )

    def put(self, numbers: Sequence[int], checked: Any) -> None:
        """Notes what was found of rows, in place of what was found before; `checked` is a table of `row_check.COLUMNS`."""
        rows = numpy.asarray(numbers, dtype=numpy.int64)
        self.lengths[rows] = checked.column("length").to_numpy()
        self.num_images[rows] = checked.column("num_images").to_numpy()
        self.num_videos[rows] = checked.column("num_videos").to_numpy()
        self.visual_tokens[rows] = checked.column("visual_tokens").to_numpy()
        reasons: list[str | None] = checked.column("reason").to_pylist()
        for number, reason in zip(numbers, reasons, strict=True):
            if reason is None:
                self.reasons.pop(number, None)
            else:
                self.reasons[number] = reason
