"""Compares runs by two accuracies: of the training rollouts of all steps, and on held-out problems at the end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.report.recorded_run import load_run
from lab.studies.support.study_statistics import BySeed, adjusted_cells, cell, number_cell, paired
from lab.support.tables import table

Record = dict[str, Any]
"""The figures of a run: `seed`, the name of what was trained, and those of `figures_of`."""

STAGES = ("generate", "score", "teachers", "update")
"""The stages whose tokens are counted; a prompt counts once for the responses that share it."""
_REACHED = 0.5
"""The share of right rollouts whose step and time the table of times has."""
WINDOW = 3
"""The number of steps over whose rollouts an accuracy is averaged, because that of a single step is noisy."""


def figures_of(run_folder: Path, *, trained: str) -> Record:
    """Returns the shares of right responses of a run, its seconds by step, and the tokens of all steps by stage.

    `trained` is the metric of each step's rollouts. The shares of the validations are by step, under their numbers as text.
    """
    run = load_run(run_folder)
    _, of_rollouts = run.series(trained)
    _, step_seconds = run.series("timing_s/step")
    held_out: dict[str, float] = {}
    for step, value in run.values_by_step("val/accuracy").items():
        held_out[str(step)] = round(value, 5)
    return {
        "trained": [round(value, 5) for value in of_rollouts],
        "held_out": held_out,
        "step_seconds": [round(value, 2) for value in step_seconds],
        "tokens": {stage: int(sum(run.series(f"tokens/{stage}")[1])) for stage in STAGES},
    }


def rollout_accuracy(record: Record) -> float:
    """Returns the share of right responses among the training rollouts of all steps."""
    return statistics.fmean(record["trained"])


def held_out_accuracy(record: Record) -> float:
    """Returns the share of right responses in the last validation."""
    last_step = max(record["held_out"], key=int)
    return record["held_out"][last_step]


def minutes(record: Record) -> float:
    """Returns the wall-clock time of all steps, without validations, in minutes."""
    return sum(record["step_seconds"]) / 60


def thousand_tokens(record: Record, stages: Sequence[str]) -> float:
    """Returns the tokens of these stages in all steps, in thousands."""
    return sum(record["tokens"][stage] for stage in stages) / 1000


def step_of_half(record: Record) -> int | None:
    """Returns the first step that ends three steps with half of the rollouts right; None if no step does."""
    trained = record["trained"]
    for end in range(WINDOW, len(trained) + 1):
        if statistics.fmean(trained[end - WINDOW : end]) >= _REACHED:
            return end
    return None


def minutes_to_half(record: Record) -> float | None:
    """Returns the minutes of training until the end of `step_of_half`; None if there is no such step."""
    last_step = step_of_half(record)
    if last_step is None:
        return None
    return sum(record["step_seconds"][:last_step]) / 60


def by_name_and_seed(records: Sequence[Record], *, kind: str, names: Sequence[str]) -> Mapping[str, BySeed]:
    """Returns the records of each of `names`, by seed; a record's name stands under `kind`, such as "arm"."""
    by_name: dict[str, dict[int, Record]] = {name: {} for name in names}
    for record in records:
        by_name[record[kind]][record["seed"]] = record
    return by_name


def work_table(by_name: Mapping[str, BySeed], *, kind: str) -> str:
    """Returns a Markdown table of the work and the minutes of training, and of those until half of the rollouts are right.

    Work is in thousands of tokens: sampled, read without a gradient by actor and teachers, and trained on. All are means
    over seeds with standard errors. A run that does not get so far is left out there, and their number is named.
    """
    rows: list[list[str]] = []
    for name, of_seeds in by_name.items():
        records = list(of_seeds.values())
        steps = [float(step) for record in records if (step := step_of_half(record)) is not None]
        times = [time for record in records if (time := minutes_to_half(record)) is not None]
        row = [name]
        for stages in (["generate"], ["score", "teachers"], ["update"]):
            row.append(number_cell([thousand_tokens(record, stages) for record in records]))
        row.append(number_cell([minutes(record) for record in records]))
        row.append(f"{len(steps)} of {len(records)}")
        row += [number_cell(steps), number_cell(times)] if steps else ["", ""]
        rows.append(row)
    reached = f"{100 * _REACHED:.0f} %"
    head = [
        kind,
        "sampled",
        "read",
        "trained on",
        "training, min",
        f"runs that reach {reached}",
        "at step",
        "after min",
    ]
    return table(head, rows)


def differences_table(
    by_name: Mapping[str, BySeed], *, kind: str, baseline: str, num_planned: int | None = None
) -> str:
    """Returns a Markdown table in percent: both measures, and their paired differences from the baseline with Holm's p.

    Each name has a row, with its number of seeds and, if given, that of the plan.
    """
    head = [kind, "seeds"]
    rows: list[list[str]] = []
    for name, of_seeds in by_name.items():
        planned = "" if num_planned is None else f" of {num_planned}"
        rows.append([name, f"{len(of_seeds)}{planned}"])
    for title, measure in (("rollouts %", rollout_accuracy), ("held out %", held_out_accuracy)):
        head += [title, f"minus {baseline}", "p, Holm"]
        differences: dict[str, list[float]] = {}
        for name, of_seeds in by_name.items():
            if name != baseline:
                differences[name] = paired(by_name[baseline], of_seeds, measure)
        p_of_name = adjusted_cells(differences)
        for row, (name, of_seeds) in zip(rows, by_name.items(), strict=True):
            row.append(cell([measure(record) for record in of_seeds.values()]))
            if name == baseline:
                row += ["", ""]
            else:
                row += [cell(differences[name], signed=True), p_of_name[name]]
    return table(head, rows)


def seed_table(
    by_name: Mapping[str, BySeed], measure: Callable[[Record], float], *, kind: str, seeds: Sequence[int]
) -> str:
    """Returns a Markdown table with a measure of every run, in percent."""
    rows: list[list[str]] = []
    for name, of_seeds in by_name.items():
        row = [name]
        for seed in seeds:
            row.append(f"{100 * measure(of_seeds[seed]):.1f}" if seed in of_seeds else "")
        rows.append(row)
    return table([kind, *[f"seed {seed}" for seed in seeds]], rows)


def names_in(records: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Returns the names under `kind` in the order of their first record."""
    return list(dict.fromkeys(record[kind] for record in records))
