"""Builds the table at the end of a run: the change in accuracy, the evidence, and the time of each stage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from cepo.report.curves import wilson_interval
from cepo.report.recorded_run import RunData, load_run
from cepo.tracking.console import STAGES
from cepo.tracking.run_folder import read_environment, read_generations


@dataclass(frozen=True, kw_only=True)
class AccuracyChange:
    """The held-out accuracy at the first and the last measured step.

    Attributes:
        num_samples: samples per measurement; None if the run did not record it.
        difference_error: standard error of `after - before`; None without `num_samples`.
        paired: whether that error comes from the differences problem by problem. Otherwise it is `sqrt(se_before^2 +
            se_after^2)`, which is too large if both measurements use the same problems.
    """

    before_step: int
    before: float
    after_step: int
    after: float
    num_samples: int | None
    difference_error: float | None
    paired: bool

    @property
    def difference(self) -> float:
        """`after - before`, as a fraction."""
        return self.after - self.before


def run_summary(run_folder: Path) -> Table:
    """Returns a run's summary as a table; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(Path(run_folder))
    table = Table(
        title=escape(f"{run.estimator}: {run.name}"), title_justify="left", show_header=False, title_style="bold"
    )
    table.add_column("quantity", no_wrap=True)
    table.add_column("value")
    for quantity, value in summary_rows(run):
        table.add_row(quantity, value)
    return table


def summary_rows(run: RunData) -> list[tuple[str, str]]:
    """Returns the rows of the summary: quantities and their values as text."""
    return [*_accuracy_rows(run), *_evidence_rows(run), *_time_rows(run)]


def subtitle(run: RunData) -> str:
    """Returns one line on a run: method, model, data, device, date, duration and status."""
    start = next(iter(read_environment(run.folder)), {})
    names = [run.setting("worker.actor.model.model_path"), run.setting("data.train_files")]
    devices = start.get("devices") or [start.get("processor") or ""]
    steps, planned = run.last_step, run.setting("trainer.max_steps")
    minutes, seconds = divmod(round(run.seconds), 60) if math.isfinite(run.seconds) else (None, None)
    parts = [
        run.estimator,
        *("/".join(Path(str(name)).parts[-2:]) for name in names if name),
        ", ".join(dict.fromkeys(map(str, devices))),
        str(start.get("started", ""))[:16].replace("T", " "),
        f"{minutes} min {seconds} s" if run.rows and minutes is not None else "",
        f"{steps} of {planned} steps" if planned else f"steps: {steps}",
    ]
    return " · ".join(part for part in parts if part)


def result_lines(run: RunData) -> list[tuple[str, str, str]]:
    """Returns of sampled and of greedy accuracy its last value, its name with a 95 % interval, and the change."""
    lines: list[tuple[str, str, str]] = []
    for label, name, counted in (
        (f"accuracy at temperature {run.temperature(validation=True):g}", "val/accuracy", "val/num_samples"),
        ("greedy accuracy", "val/greedy_accuracy", "val/num_greedy_samples"),
    ):
        steps, values = run.series(name)
        counts = run.values_by_step(counted)
        change = accuracy_change(run, greedy=name != "val/accuracy")
        if not steps:
            continue
        first, last = (f"{100 * value:.1f} %" for value in (values[0], values[-1]))
        ends = [_interval(values[place], counts.get(steps[place])) for place in (0, -1)]
        story = f"measured once, at step {steps[0]}"
        if change is not None:
            story = f"from {first}{ends[0]} at step {steps[0]}: {_points(change, with_kind=False)}"
        lines.append((last, label + ends[1], story))
    return lines


def accuracy_change(run: RunData, *, greedy: bool = False) -> AccuracyChange | None:
    """Returns the change from the first to the last validation; None if fewer than two were made."""
    steps, values = run.series("val/greedy_accuracy" if greedy else "val/accuracy")
    if len(steps) < 2:
        return None
    counts = run.values_by_step("val/num_greedy_samples" if greedy else "val/num_samples")
    first, last = steps[0], steps[-1]
    error, paired = None, False
    if first in counts and last in counts:
        error = None if greedy else _paired_error(run, first, last, counts)
        paired = error is not None
        if error is None:
            parts = [_error(value, counts[step]) for step, value in ((first, values[0]), (last, values[-1]))]
            error = None if None in parts else math.hypot(*(part for part in parts if part is not None))
    return AccuracyChange(
        before_step=first,
        before=values[0],
        after_step=last,
        after=values[-1],
        num_samples=int(counts[first]) if math.isfinite(counts.get(first, math.nan)) else None,
        difference_error=error,
        paired=paired,
    )


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


def _accuracy_rows(run: RunData) -> list[tuple[str, str]]:
    rows = [("training steps", str(run.last_step))]
    change = accuracy_change(run)
    if change is None:
        steps, values = run.series("val/accuracy")
        shown = f"{values[0]:.3f} after step {steps[0]}, measured once" if steps else "not measured"
        return [*rows, ("held-out accuracy", shown)]
    for label, step, value in (
        ("held-out accuracy before", change.before_step, change.before),
        ("held-out accuracy after", change.after_step, change.after),
    ):
        rows.append((label, f"{value:.3f}{_with_error(value, change.num_samples)}, step {step}"))
    return [*rows, ("difference", _points(change))]


def _evidence_rows(run: RunData) -> list[tuple[str, str]]:
    rows = [
        (label, f"{100 * statistics.fmean(values):.1f} %")
        for label, name in (
            ("tokens with positive evidence", "evidence/positive_fraction"),
            ("tokens with negative evidence", "evidence/negative_fraction"),
        )
        if (values := run.series(name)[1])
    ]
    if not rows:
        return [("evidence", "none: this run consulted no teacher")]
    weights, lambdas = run.series("evidence/weight_mean")[1], run.series("evidence/lambda")[1]
    if weights:
        rows.append(("mean weight", f"{statistics.fmean(weights):.4f}"))
    if lambdas:
        rows.append(("lambda, first to last step", f"{lambdas[0]:.3f} to {lambdas[-1]:.3f}"))
    return rows


def _time_rows(run: RunData) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for stage in (*STAGES, "step"):
        values = _training_values(run, f"timing_s/{stage}")
        if not values:
            continue
        shown = f"{statistics.median(values):.2f} s"
        if stage in ("validate", "save"):
            shown += f", {len(values)} times"
        speed = tokens_per_second(run, stage)
        if speed is not None:
            shown += f", {speed:,.0f} tokens/s"
        rows.append(("whole step, median" if stage == "step" else f"{stage}, median", shown))
    return rows


def _training_values(run: RunData, name: str) -> list[float]:
    return [value for step, value in zip(*run.series(name), strict=True) if step > 0 and value > 0]


def _points(change: AccuracyChange, *, with_kind: bool = True) -> str:
    points = f"{100 * change.difference:+.1f} points"
    if change.difference_error is None:
        return points
    kind = "paired" if change.paired else "as if the two were independent"
    return f"{points} ± {100 * change.difference_error:.1f}" + (f" ({kind})" if with_kind else "")


def _interval(value: float, count: float | None) -> str:
    interval = wilson_interval(value, count, 1.96)
    return f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""


def _with_error(value: float, count: float | None) -> str:
    error = _error(value, count)
    return "" if error is None else f" ± {error:.3f} (n {count:.0f})"


def _error(value: float, count: float | None) -> float | None:
    interval = wilson_interval(value, count)
    return None if interval is None else (interval[1] - interval[0]) / 2


def _paired_error(run: RunData, first: int, last: int, counts: dict[int, float]) -> float | None:
    """Returns the standard error of the mean per-problem difference; None unless all samples of both are recorded."""
    recorded: dict[int, dict[str, list[float]]] = {first: {}, last: {}}
    for row in read_generations(run.folder):
        if row["step"] in recorded:
            recorded[row["step"]].setdefault(row["prompt_id"], []).append(float(row["accuracy"]))
    before, after = recorded[first], recorded[last]
    complete = all(sum(map(len, recorded[step].values())) == counts[step] for step in (first, last))
    if not complete or before.keys() != after.keys() or len(before) < 2:
        return None
    return _error_of_mean([statistics.fmean(after[name]) - statistics.fmean(before[name]) for name in before])


def _error_of_mean(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
