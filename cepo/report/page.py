"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Column
from rich.table import Table as TerminalTable

from cepo.algorithms import available_estimators
from cepo.config.listing import REQUIRED, method_settings, settings_of
from cepo.files.trees import Fields, leaves
from cepo.report.credit_view import credit_view
from cepo.report.drawing import Sample, Section, Table, samples_table, save_figure, write_page
from cepo.report.recorded_run import COUNTS, HELD_OUT, RunData, as_yaml, chart_sections, load_run, run_charts
from cepo.report.score_tables import Cell
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import STAGES
from cepo.run_folder.records import read_generations

REPORT_FILE = "report.html"
_EVIDENCE = (
    ("tokens with positive evidence", "evidence/positive_fraction", "{mean:.1%}"),
    ("tokens with negative evidence", "evidence/negative_fraction", "{mean:.1%}"),
    ("mean weight", "evidence/weight_mean", "{mean:.4f}"),
    ("lambda, first to last step", "evidence/lambda", "{first:.3f} to {last:.3f}"),
)


class Run(RunData):
    """The records of a run, as they were when it was opened."""

    def page(self, out: Path | str | None = None) -> Path:
        """Writes the report of the run, by default `report.html` in its folder, and returns the file's path."""
        return write_report(self.folder, None if out is None else Path(out))


def open_run(folder: Path | str) -> Run:
    """Opens a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    return Run(**vars(load_run(Path(folder))))


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run as `Run.page` does; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(run_folder)
    charts = run_charts(run)
    first = charts.pop(0) if charts and charts[0].title == HELD_OUT else None
    return write_page(
        out or run.folder / REPORT_FILE,
        title=run.name,
        subtitle=subtitle(run),
        results=result_lines(run),
        first=first,
        sections=[*chart_sections(charts), *_records(run)],
        credit=credit_view(run),
        clocks=_clocks(run),
    )


def save_curves(run_folder: Path, out: Path) -> Path:
    """Draws a run's charts into one PNG, PDF or SVG file; returns its path; raises `DataError` as `write_report`."""
    return save_figure(run_charts(load_run(run_folder)), out)


def _clocks(run: RunData) -> dict[str, dict[int, float]]:
    """Returns the tokens that were generated, and the minutes that passed, up to each step."""
    clocks: dict[str, dict[int, float]] = {}
    for name, metric, unit in (("tokens", "tokens/generate", 1), ("minutes", "timing_s/step", 60)):
        steps, values = run.series(metric)
        if steps:
            sums = itertools.accumulate(value / unit for value in values)
            clocks[name] = {0: 0.0, **dict(zip(steps, sums, strict=True))}
    return clocks


def _records(run: RunData) -> Iterator[Section]:
    samples = _samples_tables(run)
    if samples:
        yield Section(title="Samples", tables=samples)
    if run.rows:
        summary = Table(head=["quantity", "value"], rows=summary_rows(run))
        yield Section(title="Summary", tables=[summary])
    yield Section(title="All metrics", tables=[_metrics_table(run)])
    yield Section(title="Configuration", tables=[_config_table(run)])
    versions = _versions_table(run)
    if versions.rows:
        yield Section(title="Versions", tables=[versions])


def _versions_table(run: RunData) -> Table:
    """Returns what each start of the run noted of its environment, one column a start."""
    starts = [dict(leaves(entry)) for entry in read_environment(run.folder)]
    head = ["entry", *(f"start {number}" for number in range(1, len(starts) + 1))]
    keys = dict.fromkeys(itertools.chain.from_iterable(starts))
    rows: list[list[str]] = []
    for key in keys:
        values = [str(start.get(key, "")) for start in starts]
        rows.append([key, *values])
    return Table(head=head, rows=rows)


def _samples_tables(run: RunData) -> list[Table]:
    """Returns each problem's responses at the first and at the last validation."""
    rows = list(read_generations(run.folder))
    steps = sorted({row["step"] for row in rows})
    measured: dict[str, list[Sample]] = {}
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        samples: list[Sample] = []
        num_responses: dict[str, int] = {}  # so far, by problem
        for row in rows:
            if row["step"] != step:
                continue
            problem = row["prompt_id"]
            number = num_responses.get(problem, 0)
            num_responses[problem] = number + 1
            samples.append((f"{problem} {number}", row["accuracy"] >= 0.5, row))
        measured[f"at step {step}"] = samples
    return [samples_table(measured)] if measured else []


def _metrics_table(run: RunData) -> Table:
    rows: list[Sequence[str | float]] = []
    for name in run.names():
        steps, values = run.series(name)
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        mean = math.fsum(finite) / len(finite)
        rows.append([name, len(values), values[0], values[-1], min(finite), max(finite), mean, steps[-1]])
    return Table(head=["metric", "measured", "first", "last", "lowest", "highest", "mean", "last step"], rows=rows)


def _config_table(run: RunData) -> Table:
    settings = list(settings_of())
    if run.estimator in available_estimators():
        settings += method_settings(run.estimator)
    defaults = {setting.key: setting.default for setting in settings}
    rows: list[list[str]] = []
    for key, value in leaves(run.config):
        default = defaults.get(key, REQUIRED)
        if default is REQUIRED:
            note = "required"
        elif value == default:
            note = ""
        else:
            note = as_yaml(default)
        rows.append([key, as_yaml(value), note])
    rows.sort(key=lambda row: row[2] == "")
    return Table(head=["setting", "value", "default"], rows=rows, caption="those that differ from the default first")


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
    for value, name, change in result_lines(run) or [("not measured", "held-out accuracy", "")]:
        rows.append((name, value))
        rows += [("", part) for part in change.split(": ") if part]
    evidence: list[tuple[str, str]] = []
    for label, name, template in _EVIDENCE:
        _, values = run.series(name)
        if values:
            text = template.format(mean=statistics.fmean(values), first=values[0], last=values[-1])
            evidence.append((label, text.replace("%", " %")))
    if not evidence:
        evidence.append(("evidence", "none: this run consulted no teacher"))
    return [*rows, *evidence, *_time_rows(run)]


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
        parts.append(f"{seconds // 60:.0f} min {seconds % 60:.0f} s")
    planned_steps = run.setting("trainer.max_steps")
    parts.append(f"{run.last_step} of {planned_steps} steps" if planned_steps else f"steps: {run.last_step}")
    return " · ".join(part for part in parts if part)


def result_lines(run: RunData) -> list[tuple[str, str, str]]:
    """Returns of sampled and of greedy accuracy its last value, its name with a 95 % interval, and the change."""
    lines: list[tuple[str, str, str]] = []
    labels = (f"accuracy at temperature {run.temperature:g}", "greedy accuracy")
    for label, name in zip(labels, COUNTS, strict=True):
        accuracies = run.accuracies(name)
        if accuracies:
            last = list(accuracies.values())[-1]
            lines.append((f"{100 * last.mean:.1f} %", label + _interval(last), _change_in_words(run, name)))
    return lines


def _change_in_words(run: RunData, name: str) -> str:
    first_step, first = next(iter(run.accuracies(name).items()))
    result = accuracy_change(run, name)
    if result is None:
        return f"measured once, at step {first_step}"
    change, is_paired = result
    start = f"from {100 * first.mean:.1f} %{_interval(first)} at step {first_step}"
    error = "" if change.error is None else f" ± {100 * change.error:.1f}"
    pairing = ", paired by problem" if is_paired else ""
    return f"{start}: {100 * change.mean:+.1f}{error} points{pairing}"


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
    if _num_samples(at_first) != counts.get(first_step) or _num_samples(at_last) != counts.get(last_step):
        return []
    if at_first.keys() != at_last.keys():
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


def _num_samples(samples: Mapping[str, Sequence[float]]) -> int:
    return sum(len(values) for values in samples.values())


def _interval(cell: Cell) -> str:
    return "" if cell.low is None or cell.high is None else f" ({100 * cell.low:.1f} to {100 * cell.high:.1f})"


def _time_rows(run: RunData) -> Iterator[tuple[str, str]]:
    for stage in (*STAGES, "step"):
        seconds_by_step = run.values_by_step(f"timing_s/{stage}")
        durations = [seconds for step, seconds in seconds_by_step.items() if step > 0 and seconds > 0]
        if not durations:
            continue
        times = f", {len(durations)} times" if stage in ("validate", "save") else ""
        # The tokens of "score" do not give its speed: teachers may be scored with it.
        tokens_by_step = {} if stage == "score" else run.values_by_step(f"tokens/{stage}")
        tokens: list[float] = []
        seconds_of_tokens: list[float] = []
        for step, seconds in seconds_by_step.items():
            if step in tokens_by_step and seconds > 0:
                tokens.append(tokens_by_step[step])
                seconds_of_tokens.append(seconds)
        speed = f", {sum(tokens) / sum(seconds_of_tokens):,.0f} tokens/s" if tokens else ""
        label = "whole step, median" if stage == "step" else f"{stage}, median"
        yield label, f"{statistics.median(durations):.2f} s{times}{speed}"
