"""Builds the parts of the study's page that are not tables of accuracy: speed of learning, gradient signal, charts."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy
from numpy.typing import NDArray

from cepo.report.drawing import Chart, Series
from cepo.report.score_tables import Cell
from lab.studies.support.study_plan import BASELINE, EQUAL_RATES, PLAN, Comparison, Profile, comparisons
from lab.studies.support.study_statistics import Record, Runs, adjusted_cells, arm_table, cell, final, paired
from lab.support.machine import ROOT
from lab.support.tables import table

_DRAWS = 2000
Curves = NDArray[numpy.float64]
"""The share of correct rollouts; shape (seeds, steps)."""


def steps_to_reach(own: Curves, base: Curves) -> float:
    """Returns the first step at which `own` has the accuracy of `base` after its last step; infinite if there is none.

    Both are means over seeds and over a window, a fifth of the steps of `base`, up to that step, to reduce noise. `own`
    may have more steps than `base`.
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


def speed_parts(runs: Runs, arms: Sequence[str], profile: Profile) -> Iterator[str]:
    """Yields the page's parts on how fast the arms learn at equal rates."""
    num_steps = profile.rollouts // runs.batch
    yield (
        f"## {runs.world}: speed of learning\n\nAccuracy on the training rollouts of all steps, which is the higher the faster "
        "an arm learns. No problem is sampled twice in a run, and all arms of a seed have the same problems. Then the number of "
        f"steps after which an arm's accuracy on these rollouts equals {BASELINE}'s after {num_steps // 2} and after {num_steps} "
        f"steps. For these steps, accuracy is a mean over seeds and over a window of a fifth of {BASELINE}'s steps; {BASELINE} "
        "itself may reach it earlier. Intervals are 95 % bootstrap intervals over seeds."
    )
    yield speed_table(runs, arms, num_steps)


def comparison_parts(runs: Runs, profile: Profile) -> Iterator[str]:
    """Yields the page's parts on the plan's further comparisons in a world."""
    for other in comparisons(profile, runs.world):
        own = _runs_of(other, runs)
        yield (
            f"## {runs.world}: {other.title[0].lower()}{other.title[1:]}\n\n{other.why} Run seeds "
            f"{', '.join(map(str, other.seeds))}; {other.batch} rollouts per step, {other.steps} steps, learning rate "
            f"{EQUAL_RATES[runs.world]:g}. The measure, accuracy on the rollouts of all steps, was fixed before these runs."
        )
        yield speed_table(own, other.arms, other.steps)
        yield "Accuracy on the held-out problems after these steps:"
        yield arm_table(own.equal, other.arms, own.seeds)


def comparison_sentences(runs: Runs, profile: Profile) -> str:
    """Returns the results of the further comparisons for the page's summary; empty if none was run."""
    told = ""
    for other in comparisons(profile, runs.world):
        own = _runs_of(other, runs)
        differences = _differences(own, other.arms)
        adjusted = adjusted_cells(differences)
        found = ", ".join(
            f"{arm} {cell(differences[arm], signed=True)} (p {p} by Holm)" for arm, p in adjusted.items() if p
        )
        if found:
            told += (
                f" {other.title} ({len(own.equal(BASELINE))} of {len(own.seeds)} seeds), accuracy on the rollouts of all steps "
                f"minus {BASELINE}'s, in points: {found}."
            )
    return told


def _runs_of(other: Comparison, runs: Runs) -> Runs:
    return dataclasses.replace(runs, batch=other.batch, seeds=other.seeds)


def _differences(runs: Runs, arms: Sequence[str]) -> dict[str, list[float]]:
    base = runs.equal(BASELINE)
    return {arm: paired(base, runs.equal(arm), rollout_accuracy) for arm in arms if arm != BASELINE}


def speed_table(runs: Runs, arms: Sequence[str], num_steps: int) -> str:
    base, differences, moments = runs.equal(BASELINE), _differences(runs, arms), (num_steps // 2, num_steps)
    adjusted = adjusted_cells(differences)
    rows: list[list[str]] = []
    for arm in arms:
        found = runs.equal(arm)
        row = [arm, f"{len(found.keys() & base.keys())} of {len(runs.seeds)}"]
        row.append(cell([rollout_accuracy(record) for record in found.values()]))
        row += [cell(differences[arm], signed=True), adjusted[arm]] if arm in differences else ["", ""]
        rows.append(row + [text for moment in moments for text in _speed_cells(runs, arm, moment)])
    head = ["arm", "runs", "rollouts %", f"rollouts - {BASELINE}", "p, Holm"]
    head += [text for moment in moments for text in (f"steps to {BASELINE}'s after {moment}", "interval")]
    return table(head, rows)


def rollout_accuracy(record: Record) -> float:
    """Returns the share of correct rollouts over all steps of a run."""
    return statistics.fmean(record["trained"])


def _speed_cells(runs: Runs, arm: str, moment: int) -> list[str]:
    """Returns an arm's steps to the baseline's accuracy after `moment` steps, and their interval, for a table.

    They are computed from the seeds that the baseline has too.
    """
    found, base = runs.equal(arm), runs.equal(BASELINE)
    seeds = sorted(found.keys() & base.keys())
    if not seeds:
        return ["not run", ""]
    own, whole = (numpy.array([part[seed]["trained"] for seed in seeds]) for part in (found, base))
    other, num_steps = whole[:, :moment], whole.shape[1]
    bounds = (_written(bound, num_steps) for bound in interval(own, other))
    return [_written(steps_to_reach(own, other), num_steps), " to ".join(bounds) if len(seeds) > 1 else ""]


def _written(value: float, most: int) -> str:
    return f"more than {most}" if math.isinf(value) else f"{value:.0f}"


def gradients_part(runs: Runs) -> str:
    """Returns the page's part with the gradient figures of docs/credit.md and the accuracy of the arms."""
    moments: Mapping[str, str] = PLAN["gradient_measurements"][runs.world]
    measured: dict[str, dict[str, str]] = {}
    for moment, name in moments.items():
        file = ROOT / "lab" / "studies" / "results" / f"credit_gradient_{name}.json"
        for row in json.loads(file.read_text(encoding="utf-8"))["gradient"]:
            ratio = row["ratio"]
            text = f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            measured.setdefault(row["name"], {})[moment] = text
    base = runs.equal(BASELINE)
    rows = [
        [name, *(measured[name][moment] for moment in moments), arm,
         cell([final(record) for record in runs.equal(arm).values()]),
         "" if arm == BASELINE else cell(paired(base, runs.equal(arm)), signed=True)]
        for name, arm in PLAN["gradients"].items() if name in measured
    ]  # fmt: skip
    head = ["estimator", *(f"SNR ratio, {moment}" for moment in moments), "arm", "sampled %", f"sampled - {BASELINE}"]
    return (
        f"## {runs.world}: gradient signal and accuracy\n\nSignal-to-noise ratio of a batch gradient over that of "
        "uniform credit, with 95 % intervals, from `lab/studies/results/credit_gradient_*.json` "
        "([credit](../../docs/credit.md)), and the accuracy at equal learning rates. "
        "The measured estimators of cepo have lambda 1, while the trained arms start at 0.5 and divide by the standard "
        "deviation of the group.\n\n" + table(head, rows)
    )


def charts(profile: Profile, runs: Runs) -> list[Chart]:
    """Returns charts of sampled and greedy accuracy at equal learning rates, by groups of arms."""
    panels = [(title, arms, "sampled") for title, arms in PLAN["panels"].items()]
    panels += [(f"{title}, greedy", arms, "greedy") for title, arms in PLAN["panels"].items()]
    return [
        Chart(title=f"{runs.world}: {title}", unit=f"{name} accuracy", series=[*_series(runs, arms, name)])
        for title, arms, name in panels
        if any(runs.equal(arm) for arm in arms if arm in profile.arms)
    ]


def _series(runs: Runs, arms: Sequence[str], name: str) -> Iterator[Series]:
    for arm in arms:
        records = [*runs.equal(arm).values()]
        if not records:
            continue
        steps = sorted(map(int, records[0][name]))
        spreads = [Cell.over([record[name][str(step)] for record in records]) for step in steps]
        means, errors = [spread.mean for spread in spreads], [spread.error or 0.0 for spread in spreads]
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        yield Series(label=arm, steps=steps, values=means, low=[*low], high=[*high])
