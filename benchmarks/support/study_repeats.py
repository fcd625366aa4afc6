"""Builds the study's second test: comparisons that the first results suggested, repeated with new seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

import numpy

from benchmarks.support.study_plan import BASELINE, GROUP_SIZE, Profile
from benchmarks.support.study_records import Record
from benchmarks.support.study_speed import interval, steps_to_reach, written_steps
from benchmarks.support.study_statistics import Runs, cell, holm, p_value, paired
from benchmarks.support.tables import table


def late(record: Record) -> float:
    """Returns the share of correct rollouts in the last fifth of a run's steps."""
    return statistics.fmean(record["trained"][-max(1, len(record["trained"]) // 5) :])


def repeats_part(runs: Runs, profile: Profile) -> Iterator[str]:
    """Yields the page's part on a world's second test; nothing if none is planned."""
    if runs.world not in profile.repeated:
        return
    arms, seeds = (profile.repeated[runs.world][key] for key in ("arms", "seeds"))
    again = dataclasses.replace(runs, seeds=seeds)
    steps, base = profile.rollouts // runs.batch, again.equal(BASELINE)
    differences = {arm: paired(base, again.equal(arm), late) for arm in arms if arm != BASELINE}
    adjusted = dict(zip(differences, holm([p_value(each) for each in differences.values()]), strict=True))
    rows: list[list[str]] = []
    for arm in arms:
        found = again.equal(arm)
        p, ends = (
            adjusted.get(arm),
            [cell([measure(record) for record in found.values()]) for measure in (late, _pooled)],
        )
        rows.append(
            [
                arm,
                f"{len(found)} of {len(seeds)}",
                ends[0],
                cell(differences[arm], signed=True) if arm in differences else "",
                "" if p is None else f"{p:.3f}",
                ends[1],
                cell(paired(base, found, _pooled), signed=True) if arm in differences else "",
                *_speed(again, arm, steps),
            ]
        )
    responses = steps // 5 * runs.batch
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


def _pooled(record: Record) -> float:
    """Sampled accuracy over all held-out sets, including that of the training distribution; they have equal sizes."""
    ends = (each["sampled"] for each in record["held_out"].values())
    return statistics.fmean([record["sampled"][str(record["steps"])], *ends])


def _speed(runs: Runs, arm: str, steps: int) -> list[str]:
    seeds = sorted(runs.equal(arm).keys() & runs.equal(BASELINE).keys())
    if not seeds:
        return ["not run", ""]
    own, base = (numpy.array([runs.equal(each)[seed]["trained"] for seed in seeds]) for each in (arm, BASELINE))
    bounds = (written_steps(bound, steps) for bound in interval(own, base))
    return [written_steps(steps_to_reach(own, base), steps), " to ".join(bounds) if len(seeds) > 1 else ""]
