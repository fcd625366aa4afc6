"""Draws compared runs: their accuracy by step, and their difference from the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from jaxtyping import Float
from numpy import ndarray

from cepo.report.drawing import Chart, Series
from lab.studies.support.compared_runs import WINDOW
from lab.studies.support.study_statistics import BySeed

Curves = Float[ndarray, "seeds steps"]
_LARGEST_DRAWN = 10
"""Points. A run that unlearns the task would otherwise press all differences that matter into one line."""


def comparison_charts(by_name: Mapping[str, BySeed], baseline: str) -> list[Chart]:
    """Returns two charts of the runs' shares of right training rollouts.

    The first has the mean over seeds of each step and the two before it. The second has the paired difference from the
    baseline's share of all rollouts up to a step, in points, with a standard error on each side; at the last step it is
    the difference of the table. A difference of more than `_LARGEST_DRAWN` points, which the first chart shows well
    enough, is left out (NaN).
    """
    ran = {name: of_seeds for name, of_seeds in by_name.items() if of_seeds}
    accuracies = [_accuracy(name, of_seeds) for name, of_seeds in ran.items()]
    # The baseline is among them, at 0, so that a name has the same colour in both charts.
    differences = [_difference(name, of_seeds, ran[baseline]) for name, of_seeds in ran.items()]
    return [
        Chart(title=f"Rollouts of {WINDOW} steps", unit="accuracy", series=accuracies),
        Chart(title=f"All rollouts so far, minus {baseline}", unit="points", series=differences),
    ]


def _accuracy(name: str, of_seeds: BySeed) -> Series:
    mean = _curves(of_seeds, sorted(of_seeds)).mean(axis=0)
    averaged = numpy.convolve(mean, numpy.ones(WINDOW) / WINDOW, mode="valid")
    return Series(label=name, steps=_steps_until(len(mean), first=WINDOW), values=averaged.tolist())


def _difference(name: str, of_seeds: BySeed, of_baseline: BySeed) -> Series:
    seeds = sorted(of_seeds.keys() & of_baseline.keys())
    differences = 100 * (_so_far(_curves(of_seeds, seeds)) - _so_far(_curves(of_baseline, seeds)))
    mean = differences.mean(axis=0)
    mean[abs(mean) > _LARGEST_DRAWN] = numpy.nan
    steps = _steps_until(len(mean), first=1)
    if len(seeds) < 2:
        return Series(label=name, steps=steps, values=mean.tolist())
    error = differences.std(axis=0, ddof=1) / len(seeds) ** 0.5
    low, high = mean - error, mean + error
    return Series(label=name, steps=steps, values=mean.tolist(), low=low.tolist(), high=high.tolist())


def _curves(of_seeds: BySeed, seeds: Sequence[int]) -> Curves:
    return numpy.array([of_seeds[seed]["trained"] for seed in seeds])


def _so_far(curves: Curves) -> Curves:
    """Returns the mean of each curve up to each step."""
    num_steps = numpy.arange(1, curves.shape[1] + 1)
    return numpy.cumsum(curves, axis=1) / num_steps


def _steps_until(last: int, *, first: int) -> list[int]:
    return list(range(first, last + 1))
