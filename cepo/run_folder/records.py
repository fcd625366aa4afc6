"""Reads the metrics and validation samples that a run recorded.

Non-finite values are null in the files and NaN when read, as are those beyond float32, whose sums would overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cepo.errors import DataError, near_path
from cepo.files.safe_files import read_objects
from cepo.files.trees import Fields, Tree
from cepo.run_folder.layout import GENERATIONS_FILE, METRICS_FILE

_MOST_RUNS = 8
LARGEST_STEP = 2**31 - 1
"""The largest step that a trace can hold."""
LARGEST_NUMBER = 3.4028235e38
"""The largest number of float32."""


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """The metrics measured after the 1-based step `step`; 0 is before training."""

    step: int
    values: Mapping[str, float]


def _metrics_row(row: Fields) -> MetricsRow:
    """Returns a row as numbers; raises ValueError if it has anything else, or no step."""
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise ValueError(f"'step' must be a whole number from 0 to {LARGEST_STEP:,}")
    values: dict[str, float] = {}
    for name, value in row.items():
        number = math.nan if value is None else value
        if type(number) not in (int, float):
            raise ValueError(f"{name[:100]!a} must be a number or null")
        if name != "step":
            values[name] = float(number) if abs(number) <= LARGEST_NUMBER else math.nan
    return MetricsRow(step=step, values=values)


def read_metrics(run_folder: Path) -> list[MetricsRow]:
    """Returns a run's metrics in order; raises `DataError` if the folder or file is missing or a line is broken.

    The steps increase from line to line, since two rows of a step, or rows of two runs, would give one curve.
    """
    if run_folder.is_file():
        raise DataError(f"{run_folder} is a file; give the run folder, {run_folder.parent}")
    path = run_folder / METRICS_FILE
    if not run_folder.is_dir():
        raise DataError(
            f"run folder {run_folder} does not exist; give the one that a training run wrote its records into."
            f"{near_path(run_folder)}"
        )
    if not path.exists():
        raise DataError(
            f"{path} does not exist, so {run_folder} is not the folder of a run that has begun.{_runs_below(run_folder)}"
        )
    rows: list[MetricsRow] = []
    for number, line in enumerate(read_objects(path, within=run_folder), 1):
        try:
            row = _metrics_row(line)
            if rows and row.step <= rows[-1].step:
                raise ValueError(f"step {row.step} comes after step {rows[-1].step}")
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}. Remove that line to read the rest") from error
        rows.append(row)
    return rows


def _runs_below(folder: Path) -> str:
    """Returns a sentence that lists the run folders below a folder, at most two levels deep; empty if there are none."""
    metrics = [*folder.glob(f"*/{METRICS_FILE}"), *folder.glob(f"*/*/{METRICS_FILE}")]
    runs = [str(file.parent) for file in sorted(metrics)]
    if not runs:
        return ""
    ellipsis = ", ..." if len(runs) > _MOST_RUNS else ""
    return f" Runs in it: {', '.join(runs[:_MOST_RUNS])}{ellipsis}"


def read_generations(run_folder: Path) -> Iterator[Tree]:
    """Yields the recorded validation samples; raises `DataError` if one lacks its step, prompt or accuracy."""
    path = run_folder / GENERATIONS_FILE
    fields = {"step": int, "prompt_id": str, "accuracy": int | float}
    if not path.exists():
        return
    for row in read_objects(path, within=run_folder):
        wrong = [name for name, kind in fields.items() if not isinstance(row.get(name), kind)]
        if not wrong and not abs(row["accuracy"]) <= LARGEST_NUMBER:
            wrong = ["accuracy"]
        if not isinstance(row.get("sample", 0), int):
            wrong.append("sample")
        if wrong:
            raise DataError(f"{path}: a sample has no valid {wrong[0]}. Remove the file to read the rest")
        yield row
