"""Computes how many steps an arm needs to reach the baseline's accuracy on training rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from benchmarks.support.study_plan import BASELINE, Profile
from benchmarks.support.study_statistics import Runs
from benchmarks.support.tables import table

_DRAWS = 2000
Curves = NDArray[numpy.float64]
"""The share of correct rollouts; shape (seeds, steps)."""


def steps_to_reach(own: Curves, base: Curves) -> float:
    """Returns the first step at which `own` has the accuracy of `base` after its last step; infinite if there is none.

    Both are means over seeds and over a window of a fifth of all steps up to that step, to reduce noise.
    """
    width = max(1, base.shape[1] // 5)
    target = base[:, -width:].mean()
    sums = numpy.cumsum(numpy.pad(own.mean(axis=0), (1, 0)))
    smoothed = (sums[width:] - sums[:-width]) / width
    reached = numpy.flatnonzero(smoothed >= target - 1e-12)
    return float(reached[0] + width) if len(reached) else math.inf


def interval(own: Curves, base: Curves) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of `steps_to_reach`, from draws of seeds that are the same for both."""
    generator = numpy.random.default_rng(0)
    draws = generator.integers(len(own), size=(_DRAWS, len(own)))
    found = sorted(steps_to_reach(own[draw], base[draw]) for draw in draws)
    return found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS) - 1]


def speed_part(runs: Runs, arms: Sequence[str], profile: Profile) -> str:
    """Returns the page's part on the steps in which each arm reaches the baseline's final accuracy, at equal rates."""
    base, rows = runs.equal(BASELINE), list[list[str]]()
    num_steps = profile.rollouts // runs.batch
    for arm in arms:
        found = runs.equal(arm)
        seeds = sorted(found.keys() & base.keys())
        if not seeds:
            rows.append([arm, f"0 of {len(profile.seeds)}", "not run", ""])
            continue
        own, other = (numpy.array([part[seed]["trained"] for seed in seeds]) for part in (found, base))
        low, high = interval(own, other)
        bounds = f"{written_steps(low, num_steps)} to {written_steps(high, num_steps)}" if len(seeds) > 1 else ""
        rows.append(
            [arm, f"{len(seeds)} of {len(profile.seeds)}", written_steps(steps_to_reach(own, other), num_steps), bounds]
        )
    return (
        f"## {runs.world}: steps to {BASELINE}'s accuracy\n\nThe number of steps after which an arm's accuracy on its training "
        f"rollouts equals {BASELINE}'s after {num_steps} steps, at equal rates. Accuracy is a mean over seeds and over a window "
        f"of a fifth of all steps; {BASELINE} itself may reach its final accuracy earlier. Intervals are 95 % bootstrap "
        "intervals over seeds.\n\n" + table(["arm", "runs", "steps", "interval"], rows)
    )


def written_steps(value: float, most: int) -> str:
    """Formats a number of steps for a table."""
    return f"more than {most}" if math.isinf(value) else f"{value:.0f}"
