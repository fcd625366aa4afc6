"""Reads the records of the study's runs, and chooses learning rates from those on the tuning world's problems."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cepo.report.recorded_run import RunData, load_run
from lab.support.study_plan import Profile, Run, sweep, swept

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
