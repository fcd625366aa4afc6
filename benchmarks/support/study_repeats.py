"""Builds the study's second test: comparisons that the first results suggested, repeated with new seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.support.study_plan import BASELINE, GROUP_SIZE, Profile
from benchmarks.support.study_records import Record, final
from benchmarks.support.study_speed import speed_cells, window
from benchmarks.support.study_statistics import Runs, adjusted_cells, cell, paired
from benchmarks.support.tables import table


def late(record: Record) -> float:
    """Returns the share of correct rollouts in the last fifth of a run's steps."""
    return statistics.fmean(record["trained"][-window(len(record["trained"])) :])


def repeats_part(runs: Runs, profile: Profile) -> Iterator[str]:
    """Yields the page's part on a world's second test; nothing if none is planned."""
    if runs.world not in profile.repeated:
        return
    arms, seeds = (profile.repeated[runs.world][key] for key in ("arms", "seeds"))
    again = dataclasses.replace(runs, seeds=seeds)
    steps, tested = profile.rollouts // runs.batch, _tested(again, arms)
    rows: list[list[str]] = []
    for arm in arms:
        found = again.equal(arm)
        last, held_out = (cell([measure(record) for record in found.values()]) for measure in (late, _pooled))
        differences = [*tested.get(arm, ("", "")), held_out, ""]
        if arm in tested:
            differences[-1] = cell(paired(again.equal(BASELINE), found, _pooled), signed=True)
        rows.append([arm, f"{len(found)} of {len(seeds)}", last, *differences, *speed_cells(again, arm, steps)])
    responses = window(steps) * runs.batch
    yield f"## {runs.world}: a second test with fresh seeds"
    yield (
        f"The results of seeds {', '.join(map(str, profile.seeds))} chose these comparisons and therefore cannot test them. "
        f"They are repeated here with seeds {', '.join(map(str, seeds))}, at equal learning rates. The measure was fixed "
        f"in advance: accuracy on the training rollouts of the last fifth of the steps. These are {responses} responses to "
        f"{responses // GROUP_SIZE} problems that the run sees for the first time, and the same problems for all arms of a seed. "
        f"The table also has sampled accuracy over all held-out sets, and the steps to {BASELINE}'s accuracy."
    )
    head = ["arm", "runs", "last rollouts %", f"last rollouts - {BASELINE}", "p, Holm", "held-out %"]
    yield table([*head, f"held-out - {BASELINE}", "steps", "interval"], rows)


def repeats_sentence(runs: Runs, profile: Profile) -> str:
    """Returns the second test's result for the page's summary; empty if none was run."""
    if runs.world not in profile.repeated:
        return ""
    again = profile.repeated[runs.world]
    fresh = dataclasses.replace(runs, seeds=again["seeds"])
    tested = {arm: found for arm, found in _tested(fresh, again["arms"]).items() if found[1]}
    results = ", ".join(f"{arm} {difference} (p {p} by Holm)" for arm, (difference, p) in tested.items())
    ends = f"{len(fresh.equal(BASELINE))} fresh seeds, accuracy on the last rollouts minus {BASELINE}'s"
    return f" In a second test with {ends}, in points: {results}." if tested else ""


def _tested(runs: Runs, arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Difference from the baseline and adjusted p of each arm, as the tables have them."""
    found = {arm: paired(runs.equal(BASELINE), runs.equal(arm), late) for arm in arms if arm != BASELINE}
    adjusted = adjusted_cells(found)
    return {arm: (cell(each, signed=True), adjusted[arm]) for arm, each in found.items()}


def _pooled(record: Record) -> float:
    """Sampled accuracy over all held-out sets, including that of the training distribution; they have equal sizes."""
    ends = (each["sampled"] for each in record["held_out"].values())
    return statistics.fmean([final(record), *ends])
