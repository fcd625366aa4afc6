"""Summarises a run: the change in accuracy, the evidence, and the time of each stage."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from cepo.report.curves import COUNTS, wilson_interval
from cepo.report.recorded_run import RunData, load_run
from cepo.report.score_tables import Cell
from cepo.tracking.console import STAGES
from cepo.tracking.run_folder import read_environment, read_generations


class Change(NamedTuple):
    """An accuracy's difference from the first to the last validation, with its standard error.

    If `paired`, the error is that of the mean over problems. Otherwise it is `sqrt(se_before^2 + se_after^2)`, which is
    too large for validations of the same problems; None without the number of samples.
    """

    difference: float
    error: float | None
    paired: bool


def run_summary(run_folder: Path) -> Table:
    """Returns a run's summary as a table; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(run_folder)
    title = escape(f"{run.estimator}: {run.name}")
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column("quantity", no_wrap=True)
    table.add_column("value")
    for quantity, value in summary_rows(run):
        table.add_row(quantity, value)
    return table


def summary_rows(run: RunData) -> list[tuple[str, str]]:
    """Returns the rows of the summary: quantities and their values as text."""
    results = [
        row
        for value, name, interval, change in _results(run)
        for row in ((name, value + interval), *(("", part) for part in change.split(": ")))
    ]
    accuracy = results or [("held-out accuracy", "not measured")]
    return [("training steps", str(run.last_step)), *accuracy, *_evidence_rows(run), *_time_rows(run)]


def subtitle(run: RunData) -> str:
    """Returns one line on a run: method, model, data, device, date, duration and status."""
    start = next(iter(read_environment(run.folder)), {})
    names = [run.setting("worker.actor.model.model_path"), run.setting("data.train_files")]
    steps, planned, seconds = run.last_step, run.setting("trainer.max_steps"), run.seconds
    parts = [
        run.estimator,
        *("/".join(Path(str(name)).parts[-2:]) for name in names if name),
        ", ".join(dict.fromkeys(map(str, start.get("devices") or [start.get("processor") or ""]))),
        str(start.get("started", ""))[:16].replace("T", " "),
        f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if run.rows and math.isfinite(seconds) else "",
        f"{steps} of {planned} steps" if planned else f"steps: {steps}",
    ]
    return " · ".join(filter(None, parts))


def result_lines(run: RunData) -> list[tuple[str, str, str]]:
    """Returns of sampled and of greedy accuracy its last value, its name with a 95 % interval, and the change."""
    return [(value, name + interval, change) for value, name, interval, change in _results(run)]


def _results(run: RunData) -> Iterator[tuple[str, str, str, str]]:
    names = (f"accuracy at temperature {run.temperature:g}", "greedy accuracy")
    for label, (name, counted) in zip(names, COUNTS.items(), strict=True):
        counts = run.values_by_step(counted)
        measured = [
            (step, f"{100 * value:.1f} %", _interval(value, counts.get(step)))
            for step, value in zip(*run.series(name), strict=True)
        ]
        if not measured:
            continue
        (first, before, its_interval), (_, after, interval) = measured[0], measured[-1]
        change, story = accuracy_change(run, name), f"measured once, at step {first}"
        if change is not None:
            error = "" if change.error is None else f" ± {100 * change.error:.1f}"
            kind = ", paired by problem" if change.paired else ""
            story = f"from {before}{its_interval} at step {first}: {100 * change.difference:+.1f}{error} points{kind}"
        yield after, label, interval, story


def accuracy_change(run: RunData, name: str = "val/accuracy") -> Change | None:
    """Returns the change from the first to the last validation; None if fewer than two were made."""
    steps, values = run.series(name)
    if len(steps) < 2:
        return None
    counts, ends = run.values_by_step(COUNTS[name]), (steps[0], steps[-1])
    error = _paired_error(run, name, ends, counts)
    intervals = [wilson_interval(values[place], counts.get(steps[place])) for place in (0, -1)]
    halves = [(interval[1] - interval[0]) / 2 for interval in intervals if interval]
    unpaired = math.hypot(*halves) if len(halves) == 2 else None
    return Change(values[-1] - values[0], unpaired if error is None else error, paired=error is not None)


def _paired_error(run: RunData, name: str, ends: tuple[int, int], counts: dict[int, float]) -> float | None:
    """Returns the standard error of the mean per-problem difference; None unless all samples of both are recorded."""
    key = name.removeprefix("val/")
    found: dict[int, dict[str, list[float]]] = {step: defaultdict(list) for step in ends}
    for row in read_generations(run.folder):
        if row["step"] in found and isinstance(row.get(key), int | float):
            found[row["step"]][row["prompt_id"]].append(row[key])
    before, after = (found[step] for step in ends)
    is_complete = all(sum(map(len, found[step].values())) == counts.get(step) for step in ends)
    if not is_complete or before.keys() != after.keys():
        return None
    return Cell.over([statistics.fmean(after[problem]) - statistics.fmean(before[problem]) for problem in before]).error


def _interval(value: float, count: float | None) -> str:
    interval = wilson_interval(value, count, 1.96)
    return f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""


def tokens_per_second(run: RunData, stage: str) -> float | None:
    """Returns a stage's tokens per second, over all steps that recorded both numbers; None if no step did.

    If a step has no seconds for teachers, they were scored together with the student, and their tokens count there.
    """
    tokens, seconds = run.values_by_step(f"tokens/{stage}"), run.values_by_step(f"timing_s/{stage}")
    if stage == "score":
        alone = run.values_by_step("timing_s/teachers")
        for step, count in run.values_by_step("tokens/teachers").items():
            if step not in alone:
                tokens[step] = tokens.get(step, 0.0) + count
    both = tokens.keys() & seconds.keys()
    spent = math.fsum(seconds[step] for step in both)
    return math.fsum(tokens[step] for step in both) / spent if spent > 0 else None


def _evidence_rows(run: RunData) -> Iterator[tuple[str, str]]:
    for sign in ("positive", "negative"):
        shares = run.series(f"evidence/{sign}_fraction")[1]
        if not shares:
            yield "evidence", "none: this run consulted no teacher"
            return
        yield f"tokens with {sign} evidence", f"{100 * statistics.fmean(shares):.1f} %"
    weights, lambdas = run.series("evidence/weight_mean")[1], run.series("evidence/lambda")[1]
    if weights:
        yield "mean weight", f"{statistics.fmean(weights):.4f}"
    if lambdas:
        yield "lambda, first to last step", f"{lambdas[0]:.3f} to {lambdas[-1]:.3f}"


def _time_rows(run: RunData) -> Iterator[tuple[str, str]]:
    for stage in (*STAGES, "step"):
        measured = run.values_by_step(f"timing_s/{stage}").items()
        values = [value for step, value in measured if step > 0 and value > 0]
        if not values:
            continue
        speed = tokens_per_second(run, stage)
        times = f", {len(values)} times" if stage in ("validate", "save") else ""
        shown = f"{statistics.median(values):.2f} s{times}" + ("" if speed is None else f", {speed:,.0f} tokens/s")
        yield "whole step, median" if stage == "step" else f"{stage}, median", shown
