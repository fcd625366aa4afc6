"""Says in words and numbers what a run achieved: accuracies with their errors and changes, evidence, times."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Column
from rich.table import Table as TerminalTable

from cepo.files.trees import Fields
from cepo.report.html_page import Result
from cepo.report.recorded_run import COUNTS, RunData, load_run
from cepo.report.score_tables import Cell
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import STAGES
from cepo.run_folder.records import read_generations
from cepo.terminal.lines import duration

_EVIDENCE = (
    ("tokens with positive evidence", "evidence/positive_fraction", "{mean:.1%}"),
    ("tokens with negative evidence", "evidence/negative_fraction", "{mean:.1%}"),
    ("mean weight", "evidence/weight_mean", "{mean:.4f}"),
    ("lambda, first to last step", "evidence/lambda", "{first:.3f} to {last:.3f}"),
)


def run_summary(run_folder: Path) -> TerminalTable:
    """Returns a run's summary for a terminal; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(run_folder)
    title = escape(f"{run.estimator}: {run.name}")
    table = TerminalTable(
        Column(no_wrap=True),
        Column(),
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=False,
    )
    for row in summary_rows(run):
        table.add_row(*row)
    return table


def summary_rows(run: RunData) -> list[tuple[str, str]]:
    """Returns the rows of the summary: quantities and their values as text."""
    rows = [("training steps", str(run.last_step))]
    for accuracy in accuracies(run):
        rows.append((accuracy.label, accuracy.last))
        rows += [("", part) for part in accuracy.change.split(": ")]
    if len(rows) == 1:
        rows.append(("held-out accuracy", "not measured"))
    rows += _evidence_rows(run)
    rows += _time_rows(run)
    return rows


def _evidence_rows(run: RunData) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for label, name, template in _EVIDENCE:
        _, values = run.series(name)
        if not values:
            continue
        text = template.format(
            mean=statistics.fmean(values),
            first=values[0],
            last=values[-1],
        )
        rows.append((label, text.replace("%", " %")))
    if not rows:
        _, numbers_of_teacher_rows = run.series("work/teacher_rows")
        has_teacher = any(number > 0 for number in numbers_of_teacher_rows)
        reason = "its method records no evidence/* metric" if has_teacher else "this run consulted no teacher"
        rows.append(("evidence", f"none: {reason}"))
    return rows


def subtitle(run: RunData) -> str:
    """Returns one line on a run: method, model, data, device, date, duration and status."""
    parts = [run.estimator]
    for path in (run.setting("worker.actor.model.model_path"), run.setting("data.train_files")):
        if path:
            last_two_names = Path(str(path)).parts[-2:]
            parts.append("/".join(last_two_names))
    starts = list(read_environment(run.folder))
    first_start: Fields = starts[0] if starts else {}
    devices = first_start.get("devices") or [first_start.get("processor") or ""]
    distinct_devices = dict.fromkeys(str(device) for device in devices)
    parts.append(", ".join(distinct_devices))
    date_and_minute = str(first_start.get("started", ""))[:16]
    parts.append(date_and_minute.replace("T", " "))
    seconds = run.seconds
    if run.rows and math.isfinite(seconds):
        parts.append(duration(seconds))
    planned_steps = run.setting("trainer.max_steps")
    if run.last_step == 0:
        parts.append("before any step")
    else:
        parts.append(f"{run.last_step} of {planned_steps} steps" if planned_steps else f"steps: {run.last_step}")
    return " · ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A kind of held-out accuracy at its first and last validation, as texts; `points` is empty if there was only one.

    Attributes:
        last: in percent, with its standard error if `has_error`.
        start: the first accuracy, or that it was measured once.
        points: the change in percentage points, with its standard error if that is known.
    """

    label: str
    last: str
    has_error: bool
    start: str
    points: str
    is_paired: bool

    @property
    def change(self) -> str:
        """The change in one line."""
        if not self.points:
            return self.start
        return f"{self.start}: {self.points}{', paired by problem' if self.is_paired else ''}"


def page_results(run: RunData) -> list[Result]:
    """Returns the `accuracies` for a page: the change first, then how it was measured."""
    results: list[Result] = []
    for accuracy in accuracies(run):
        details = [accuracy.start]
        if accuracy.is_paired:
            details.append("paired by problem")
        if accuracy.has_error:
            details.append("± standard error")
        results.append(
            Result(value=accuracy.last, name=accuracy.label, change=accuracy.points, details="; ".join(details))
        )
    return results


def accuracies(run: RunData) -> Iterator[Accuracy]:
    """Yields sampled, greedy and blind accuracy, as far as they were measured."""
    labels = (f"accuracy at temperature {run.temperature:g}", "greedy accuracy", "accuracy with black images")
    for name, label in zip(COUNTS, labels, strict=True):
        measured = run.accuracies(name)
        if not measured:
            continue
        first_step = min(measured)
        last = measured[max(measured)]
        start = f"measured once, at step {first_step}"
        points = ""
        is_paired = False
        change = accuracy_change(run, name)
        if change is not None:
            difference, is_paired = change
            start = f"from {_percent(measured[first_step])} at step {first_step}"
            points = f"{difference.percent.text(signed=True)} points"
        yield Accuracy(
            label=label,
            last=_percent(last),
            has_error=last.error is not None,
            start=start,
            points=points,
            is_paired=is_paired,
        )


def _percent(cell: Cell) -> str:
    return f"{cell.percent.text()} %"


def accuracy_change(run: RunData, name: str = "val/accuracy") -> tuple[Cell, bool] | None:
    """Returns the change from the first to the last validation, and whether its error is that of the mean over problems.

    Otherwise the error is that of independent samples, which is too large for validations of the same problems, or None
    without the number of samples. The result is None if fewer than two validations were made.
    """
    measured = run.accuracies(name)
    if len(measured) < 2:
        return None
    steps = list(measured)
    first_step = steps[0]
    last_step = steps[-1]
    change = measured[last_step].less(measured[first_step])
    differences = _paired_differences(run, name, first_step, last_step)
    if len(differences) > 1:
        return replace(change, error=Cell.over(differences).error), True
    return change, False


def _paired_differences(run: RunData, name: str, first_step: int, last_step: int) -> list[float]:
    """Returns the change of each problem's mean; empty unless all samples of both validations are recorded."""
    at_first = _samples_by_problem(run, name, first_step)
    at_last = _samples_by_problem(run, name, last_step)
    counts = run.values_by_step(COUNTS[name])
    are_whole = True
    for samples, step in ((at_first, first_step), (at_last, last_step)):
        are_whole &= sum(map(len, samples.values())) == counts.get(step)
    if not are_whole or at_first.keys() != at_last.keys():
        return []
    differences: list[float] = []
    for problem, samples in at_first.items():
        differences.append(statistics.fmean(at_last[problem]) - statistics.fmean(samples))
    return differences


def _samples_by_problem(run: RunData, name: str, step: int) -> dict[str, list[float]]:
    """Returns the recorded values of each problem's responses at a validation."""
    key = name.removeprefix("val/")
    samples: dict[str, list[float]] = collections.defaultdict(list)
    for row in read_generations(run.folder):
        if row["step"] == step and isinstance(row.get(key), int | float):
            samples[row["prompt_id"]].append(row[key])
    return samples


def _time_rows(run: RunData) -> Iterator[tuple[str, str]]:
    """Yields the median duration of each stage, with its number if it is not part of every step, and its speed."""
    for stage in (*STAGES, "step"):
        seconds_by_step = run.values_by_step(f"timing_s/{stage}")
        durations = [seconds for step, seconds in seconds_by_step.items() if step > 0 and seconds > 0]
        if not durations:
            continue
        label = "whole step" if stage == "step" else stage
        text = f"{statistics.median(durations):.2f} s"
        if stage in ("validate", "save"):
            text += f", {len(durations)} times"
        # The tokens of "score" do not give its speed: teachers may be scored with it.
        if stage != "score":
            text += _speed(run, stage)
        yield f"{label}, median", text


def _speed(run: RunData, stage: str) -> str:
    """Returns the tokens per second of a stage, over the steps that counted its tokens; empty if none did."""
    seconds_by_step = run.values_by_step(f"timing_s/{stage}")
    num_tokens = 0.0
    seconds_of_tokens = 0.0
    for step, num_tokens_of_step in run.values_by_step(f"tokens/{stage}").items():
        seconds = seconds_by_step.get(step, 0.0)
        if seconds > 0:
            num_tokens += num_tokens_of_step
            seconds_of_tokens += seconds
    if seconds_of_tokens == 0:
        return ""
    return f", {num_tokens / seconds_of_tokens:,.0f} tokens/s"
