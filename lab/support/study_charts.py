"""Builds the charts of the study's learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cepo.report.drawing import Chart, Series
from cepo.report.score_tables import Cell
from lab.support.study_plan import PLAN, Profile
from lab.support.study_statistics import Runs


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
