"""Compares two arms by a t test of their differences, paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.studies.support.study_statistics import p_text, p_value, tail


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired differences in points: their number, mean, standard error, 95 % interval and two-sided p."""

    number: int
    mean: float
    error: float
    low: float
    high: float
    p: float | None

    @property
    def text(self) -> str:
        """The comparison in words."""
        p = "" if self.p is None else f", p {p_text(self.p)}"
        return (
            f"{self.mean:+.1f} ± {self.error:.1f} points, 95 % {self.low:+.1f} to {self.high:+.1f}, n {self.number}{p}"
        )


def compared(differences: Sequence[float]) -> Comparison | None:
    """Compares shares by a t test of their paired differences; None for fewer than two."""
    if len(differences) < 2:
        return None
    points = [100 * difference for difference in differences]
    mean = statistics.fmean(points)
    error = statistics.stdev(points) / math.sqrt(len(points))
    reach = error * quantile(len(points) - 1)
    return Comparison(
        number=len(points), mean=mean, error=error, low=mean - reach, high=mean + reach, p=p_value(differences)
    )


def quantile(freedom: int, *, outside: float = 0.05) -> float:
    """Returns the t beyond which, on both sides, this share of Student's distribution lies."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        if tail(middle, freedom) > outside:
            low = middle
        else:
            high = middle
    return (low + high) / 2
