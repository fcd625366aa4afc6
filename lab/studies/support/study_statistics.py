"""Reads the records of the study's runs; means over seeds with errors, paired differences, verdicts on statements."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from cepo.report.recorded_run import RunData, load_run
from cepo.report.score_tables import Cell
from lab.studies.support.study_plan import (
    BASELINE,
    EQUAL_RATES,
    PLAN,
    RATIO_ARM,
    RATIO_RATES,
    Profile,
    Run,
    sweep,
    swept,
)
from lab.support.tables import table

DONE = "study_run.json"
"""The file in the folder of a finished run with what its metrics lack."""
Record = dict[str, Any]
_CURVES = {
    "sampled": "val/accuracy",
    "greedy": "val/greedy_accuracy",
    "hint_gap_wrong": "leak/hint_gap_wrong",
    "mention": "leak/mention_fraction",
}
_EVIDENCE = {
    "positive": ("evidence/positive_fraction",),
    "negative": ("evidence/negative_fraction",),
    "clipped": ("evidence/clip_low_rate", "evidence/clip_high_rate"),
}


def read_record(run: Run, out: Path) -> Record | None:
    """Returns a finished run's accuracies by step, means of the evidence, and costs; None if it is not finished."""
    folder = out / run.folder
    if not (folder / DONE).is_file():
        return None
    data, extra = load_run(folder), json.loads((folder / DONE).read_text(encoding="utf-8"))
    assert data.last_step == run.steps, f"{folder} is marked as done and has {data.last_step} of {run.steps} steps"
    return {
        **asdict(run),
        "steps": run.steps,
        **{name: _rounded(data.values_by_step(metric)) for name, metric in _CURVES.items()},
        "trained": [round(value, 5) for value in data.series("reward/accuracy")[1]],
        "evidence": {name: means for name, metrics in _EVIDENCE.items() if (means := _thirds(data, metrics))},
        "held_out": extra["held_out"],
        "processor_seconds": round(extra["processor_seconds"], 1),
        **{name: int(sum(data.series(f"tokens/{name}")[1])) for name in ("generate", "score", "teachers", "update")},
    }


def _rounded(values: dict[int, float]) -> dict[str, float | None]:
    return {str(step): round(value, 5) if math.isfinite(value) else None for step, value in values.items()}


def _thirds(data: RunData, metrics: Sequence[str]) -> list[float]:
    """Returns means of the metrics' sum over each third of the steps that have them; empty for fewer than three."""
    series = [data.series(metric)[1] for metric in metrics]
    sums = [sum(values) for values in zip(*series, strict=True)]
    size = len(sums) // 3
    parts = (sums[:size], sums[size:-size], sums[-size:]) if size else ()
    return [round(statistics.fmean(part), 5) for part in parts]


def final(record: Record, name: str = "sampled") -> float:
    """Returns the accuracy of a run's last validation."""
    return record[name][str(record["steps"])]


def chosen_rates(profile: Profile, out: Path, world: str) -> dict[str, float]:
    """Returns each swept arm's learning rate with the highest mean sampled accuracy, the lowest of equal ones."""
    chosen: dict[str, float] = {}
    for arm in swept(profile) if profile.rates else ():
        records = [read_record(run, out) for run in sweep(profile, world, arm)]
        done = [record for record in records if record is not None]
        if len(done) == len(records):
            chosen[arm] = best_rate(done)
    return chosen


def best_rate(records: Sequence[Record]) -> float:
    """Chooses the learning rate of one arm by the rule of `chosen_rates`."""
    means = {
        rate: statistics.fmean(final(record) for record in records if record["rate"] == rate)
        for rate in sorted({record["rate"] for record in records})
    }
    return max(means, key=lambda rate: means[rate])


BySeed = Mapping[int, Record]
Measure = Callable[[Record], float | None]
SIGNIFICANT = 0.05


def cell(values: Sequence[float], *, signed: bool = False) -> str:
    """Formats mean ± standard error over seeds, in percent; a single value has no error."""
    return number_cell([100 * value for value in values], signed=signed)


def number_cell(values: Sequence[float], *, signed: bool = False) -> str:
    """Formats mean ± standard error over seeds; a single value has no error."""
    if not values:
        return "not run"
    spread = Cell.over(values)
    error = "" if spread.error is None else f" ± {spread.error:.1f}"
    return f"{spread.mean:{'+' if signed else ''}.1f}{error}"


def paired(first: BySeed, second: BySeed, measure: Measure = final) -> list[float]:
    """Returns second minus first at each seed for which both have a value."""
    both = [(measure(first[seed]), measure(second[seed])) for seed in sorted(first.keys() & second.keys())]
    return [after - before for before, after in both if before is not None and after is not None]


def p_value(differences: Sequence[float]) -> float | None:
    """Returns the two-sided p of Student's t test against a mean of 0; None for fewer than two values or no spread.

    With t = sqrt(n - 1) tan(a), Student's density becomes cos(a)^(n - 2) on (-pi/2, pi/2).
    """
    spread = Cell.over(differences) if differences else None
    if spread is None or not spread.error:
        return None
    return tail(spread.mean / spread.error, len(differences) - 1)


def tail(t: float, freedom: int) -> float:
    """Returns P(|T| > |t|) of Student's distribution."""
    angles = numpy.linspace(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2, 4001)
    whole = numpy.linspace(0, math.pi / 2, 4001)
    parts = (float(numpy.trapezoid(numpy.cos(part) ** (freedom - 1), part)) for part in (angles, whole))
    return next(parts) / next(parts)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusts p values by Holm's method: under true null hypotheses, P(any is below alpha) is at most alpha."""
    made = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        largest = max(largest, min(1.0, (len(made) - rank) * p))
        adjusted[place] = largest
    return adjusted


def adjusted_cells(differences: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Returns Holm's p of each arm's differences for a table; empty for an arm without a test."""
    adjusted = holm([p_value(each) for each in differences.values()])
    return {arm: "" if p is None else p_text(p) for arm, p in zip(differences, adjusted, strict=True)}


def p_text(p: float) -> str:
    """Returns p with 3 digits; a p that they would show as 0 is `< 0.001`."""
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def untrained(record: Record) -> float:
    """Returns the sampled accuracy before training."""
    return record["sampled"]["0"]


def _clipped(record: Record) -> float | None:
    thirds = record["evidence"].get("clipped")
    return sum(thirds) / len(thirds) if thirds else None


def _absorbed(record: Record) -> float | None:
    """How far the effect of a visible answer on wrong responses has moved towards 0, in nats per token."""
    gaps = record["hint_gap_wrong"]
    start, end = gaps.get("0"), gaps.get(str(record["steps"]))
    return None if start is None or end is None else abs(start) - abs(end)


def _rise(records: BySeed, name: str) -> list[float]:
    """The mean over the last third of the steps with evidence minus that over the first third, for each run."""
    return [
        thirds[-1] - thirds[0] for record in records.values() if (thirds := record["evidence"].get(name)) is not None
    ]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement of the paper as the sign of a mean over seeds, from an entry of the plan's `statements`.

    Attributes:
        topic: its subject, from the plan.
        kind: `above` (accuracy of the first arm minus the second's), `absorbs`, `clips_less`, `rises` or `falls`.
    """

    topic: str
    kind: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """The statement in words."""
        words = {
            "above": f"{self.first} above {self.second}",
            "absorbs": f"{self.first} absorbs the answer's effect more than {self.second}, nats",
            "clips_less": f"{self.first} clips fewer weights than {self.second}",
        }
        return words.get(self.kind, f"{self.second} evidence of {self.first} {self.kind}")

    def differences(self, runs: Callable[[str], BySeed]) -> list[float]:
        """Returns one value per seed, positive if the statement holds; `runs(arm)` returns an arm's runs."""
        own = runs(self.first)
        if self.kind in ("rises", "falls"):
            return [value if self.kind == "rises" else -value for value in _rise(own, self.second)]
        if self.kind == "clips_less":
            return paired(own, runs(self.second), _clipped)
        if self.kind == "absorbs":
            return paired(runs(self.second), own, _absorbed)
        if self.first == "untrained":
            return [untrained(record) - final(record) for record in runs(self.second).values()]
        return paired(runs(self.second), own)


def _statement(entry: Mapping[str, Any]) -> Statement:
    (kind, (first, second)) = next((key, value) for key, value in entry.items() if key != "text")
    return Statement(topic=entry["text"], kind=kind, first=first, second=second)


STATEMENTS = [_statement(entry) for entry in PLAN["statements"]]


VERDICTS = ("seen", "not seen", "reversed", "one run", "not run")


def verdict(differences: Sequence[float]) -> str:
    """Returns `seen` if the mean is positive and p < 0.05, `reversed` if it is negative and p < 0.05, else `not seen`.

    A single run has no error, hence no verdict. Equal differences have no p: zeros are `not seen`, others go by sign.
    """
    if len(differences) < 2:
        return "one run" if differences else "not run"
    mean, p = statistics.fmean(differences), p_value(differences)
    if mean == 0 or (p is not None and p >= SIGNIFICANT):
        return "not seen"
    return "seen" if mean > 0 else "reversed"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The records of one world at one batch size, with some of the run seeds."""

    records: Sequence[Record]
    world: str
    batch: int
    seeds: Sequence[int]
    own_rates: Mapping[str, float]

    def at(self, arm: str, rate: float) -> BySeed:
        """Returns the runs of an arm at a learning rate, by seed."""
        return {
            record["seed"]: record
            for record in self.records
            if (record["world"], record["batch"], record["arm"], record["rate"], record["tuning"])
            == (self.world, self.batch, arm, rate, False)
            and record["seed"] in self.seeds
        }

    def equal(self, arm: str) -> BySeed:
        """Returns the runs of an arm at the equal learning rate."""
        return self.at(arm, EQUAL_RATES[self.world])

    def paper(self, arm: str) -> BySeed:
        """Returns the runs of an arm at the paper's ratio of learning rates."""
        return self.at(arm, (RATIO_RATES if arm == RATIO_ARM else EQUAL_RATES)[self.world])


def arm_table(runs: Callable[[str], BySeed], arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Returns final accuracies of the arms and their differences from the baseline's; `runs(arm)` returns runs by seed."""
    base = runs(BASELINE)
    found = {arm: runs(arm) for arm in arms}
    differences = {arm: paired(base, own) for arm, own in found.items() if arm != BASELINE}
    adjusted = adjusted_cells(differences)
    begun = [("sampled", untrained), ("greedy", lambda record: record["greedy"]["0"])]
    rows = [["untrained", len(base), "", *(cell([m(r) for r in base.values()]) for _, m in begun), "", "", ""]]
    for arm, own in found.items():
        rate = next((f"{record['rate']:g}" for record in own.values()), "")
        ends = [cell([measure(record) for record in own.values()]) for measure in (final, _greedy)]
        if not own:
            rows.append([arm, f"0 of {len(seeds)}", "", "not run", "not run", "", "", ""])
            continue
        compared = [
            "" if arm == BASELINE else cell(differences[arm], signed=True),
            adjusted.get(arm, ""),
            "" if arm == BASELINE else cell(paired(base, own, _greedy), signed=True),
        ]
        rows.append([arm, f"{len(own)} of {len(seeds)}", rate, *ends, *compared])
    head = ["arm", "runs", "rate", "sampled %", "greedy %", f"sampled - {BASELINE}", "p, Holm", f"greedy - {BASELINE}"]
    return table(head, rows)


def _greedy(record: Record) -> float:
    return final(record, "greedy")
