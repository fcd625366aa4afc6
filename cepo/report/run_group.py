"""Summarises the runs of one setting, and compares two settings by their runs with equal seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cepo.report.recorded_run import COUNTS, RunData
from cepo.report.same_settings import seeds_of
from cepo.report.score_tables import Cell

ACCURACY, GREEDY, _ = COUNTS
_TWO_SIDED_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for a 95 % interval, by degrees of freedom from 1 to 30."""


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seeds. `label` names the method and what distinguishes it from other settings."""

    label: str
    runs: tuple[RunData, ...] = field(repr=False)

    def at_end(self, name: str, *, before: bool = False) -> Cell | str:
        """Returns the mean over runs of their last accuracies, in percent, after or before training; empty if a run has none."""
        last_accuracies: list[Cell] = []
        for run in self.runs:
            accuracies = [cell for step, cell in run.accuracies(name).items() if (step == 0) == before]
            if not accuracies:
                return ""
            last_accuracies.append(accuracies[-1])
        if len(last_accuracies) == 1:  # it has no error over runs, so that of its samples stands in
            return replace(last_accuracies[0].percent, low=None, high=None)
        return Cell.over([100 * accuracy.mean for accuracy in last_accuracies])

    @property
    def seconds_per_step(self) -> Cell | str:
        """The mean over runs of their median step, in seconds; empty if a step took no time or none was measured."""
        medians: list[float] = []
        for run in self.runs:
            _, seconds = run.series("timing_s/step")
            if seconds:
                medians.append(statistics.median(seconds))
        if not medians or min(medians) <= 0:
            return ""
        return Cell.over(medians)


def paired_difference(first: Setting, second: Setting) -> Cell | str:
    """Returns the mean difference in accuracy, second minus first, in percentage points, with its 95 % interval.

    Runs with equal seeds form pairs, which are compared at the last validation that both made. Empty if a pair has no
    common validation after the start of training, or an accuracy is not a number. Without pairs, the result is the
    difference of the means at each run's end. With fewer than two pairs the error is that of two independent means. The
    interval is Student's over pairs or runs, and the normal one if all errors are those of the samples of single runs.
    """
    mean_of_first = first.at_end(ACCURACY)
    mean_of_second = second.at_end(ACCURACY)
    if isinstance(mean_of_first, str) or isinstance(mean_of_second, str):
        return ""
    differences = _differences_of_pairs(first, second)
    if differences is None or not all(map(math.isfinite, [mean_of_first.mean, mean_of_second.mean, *differences])):
        return ""
    if len(differences) > 1:
        return Cell.over(differences).with_interval(_quantile(len(differences) - 1))
    difference = mean_of_second.less(mean_of_first)
    if differences:
        difference = replace(difference, mean=differences[0])
    numbers_of_runs = [len(setting.runs) for setting in (first, second) if len(setting.runs) > 1]
    return (
        difference.with_interval(_quantile(min(numbers_of_runs) - 1)) if numbers_of_runs else difference.with_interval()
    )


def _differences_of_pairs(first: Setting, second: Setting) -> Sequence[float] | None:
    """Returns the differences of runs with equal seeds; None if a pair has no validation in common after the start."""
    partners = {seeds_of(run): run for run in first.runs}
    differences: list[float] = []
    for run in second.runs:
        partner = partners.get(seeds_of(run))
        if partner is None:
            continue
        accuracies = run.values_by_step(ACCURACY)
        partners_accuracies = partner.values_by_step(ACCURACY)
        common_steps = [step for step in accuracies if step > 0 and step in partners_accuracies]
        if not common_steps:
            return None
        last_step = max(common_steps)
        differences.append(100 * (accuracies[last_step] - partners_accuracies[last_step]))
    return differences


def _quantile(degrees_of_freedom: int) -> float:
    """Returns Student's t for a 95 % interval."""
    if degrees_of_freedom <= len(_TWO_SIDED_95):
        return _TWO_SIDED_95[degrees_of_freedom - 1]
    return 1.96 + 2.4 / degrees_of_freedom  # to the third digit
