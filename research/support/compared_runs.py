"""Compares runs by two accuracies: of the training rollouts of all steps, and on held-out problems at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.report.recorded_run import load_run
from lab.support.tables import table
from research.support.study_statistics import adjusted_cells, cell, paired

Record = dict[str, Any]
"""The figures of a run: `seed`, the name of what was trained, and those of `accuracies_of`."""


def accuracies_of(run_folder: Path, *, trained: str) -> Record:
    """Returns the shares of right responses of a run, and its seconds by step.

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
    }


def rollout_accuracy(record: Record) -> float:
    """Returns the share of right responses among the training rollouts of all steps."""
    return statistics.fmean(record["trained"])


def held_out_accuracy(record: Record) -> float:
    """Returns the share of right responses in the last validation."""
    last_step = max(record["held_out"], key=int)
    return record["held_out"][last_step]


def differences_table(
    records: Sequence[Record], *, kind: str, names: Sequence[str], baseline: str, num_planned: int | None = None
) -> str:
    """Returns a Markdown table in percent: both measures, and their paired differences from the baseline with Holm's p.

    A record's name stands under `kind`, such as "arm". Each of `names` has a row, with its number of seeds and, if given,
    that of the plan.
    """
    by_name: dict[str, dict[int, Record]] = {name: {} for name in names}
    for record in records:
        by_name[record[kind]][record["seed"]] = record
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


def names_in(records: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Returns the names under `kind` in the order of their first record."""
    return list(dict.fromkeys(record[kind] for record in records))
