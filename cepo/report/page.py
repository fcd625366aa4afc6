"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Column
from rich.table import Table as TerminalTable

from cepo.algorithms import available_estimators
from cepo.config.listing import REQUIRED, method_settings, settings_of
from cepo.files.trees import leaves
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
    starts = [dict(leaves(entry)) for entry in read_environment(run.folder)]
    rows = [[key, *(str(start.get(key, "")) for start in starts)] for key in dict.fromkeys(itertools.chain(*starts))]
    versions = Table(head=["entry", *(f"start {number}" for number, _ in enumerate(starts, 1))], rows=rows)
    for title, tables in {
        "Samples": _samples_tables(run),
        "Summary": [Table(head=["quantity", "value"], rows=summary_rows(run))] if run.rows else [],
        "All metrics": [_metrics_table(run)],
        "Configuration": [_config_table(run)],
        "Versions": [versions] if rows else [],
    }.items():
        if tables:
            yield Section(title=title, tables=tables)


def _samples_tables(run: RunData) -> list[Table]:
    """Returns each problem's responses at the first and at the last validation."""
    rows = list(read_generations(run.folder))
    steps = sorted({row["step"] for row in rows})
    measured: dict[str, list[Sample]] = {}
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        numbers = collections.defaultdict[str, Iterator[int]](itertools.count)
        measured[f"at step {step}"] = [
            (f"{row['prompt_id']} {next(numbers[row['prompt_id']])}", row["accuracy"] >= 0.5, row)
            for row in rows
            if row["step"] == step
        ]
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
    settings = [*settings_of(), *(method_settings(run.estimator) if run.estimator in available_estimators() else [])]
    defaults = {setting.key: setting.default for setting in settings}
    rows: list[list[str]] = []
    for key, value in leaves(run.config):
        default = defaults.get(key, REQUIRED)
        shown = "required" if default is REQUIRED else "" if value == default else as_yaml(default)
        rows.append([key, as_yaml(value), shown])
    rows.sort(key=lambda row: row[2] == "")
    return Table(head=["setting", "value", "default"], rows=rows, caption="those that differ from the default first")


def run_summary(run_folder: Path) -> TerminalTable:
    """Returns a run's summary for a terminal; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(run_folder)
    title = escape(f"{run.estimator}: {run.name}")
    columns = Column(no_wrap=True), Column()
    table = TerminalTable(*columns, title=title, title_justify="left", title_style="bold", show_header=False)
    for row in summary_rows(run):
        table.add_row(*row)
    return table


def summary_rows(run: RunData) -> list[tuple[str, str]]:
    """Returns the rows of the summary: quantities and their values as text."""
    rows = [("training steps", str(run.last_step))]
    for value, name, change in result_lines(run) or [("not measured", "held-out accuracy", "")]:
        rows += [(name, value), *(("", part) for part in change.split(": ") if part)]
    evidence = [
        (label, form.format(mean=statistics.fmean(values), first=values[0], last=values[-1]).replace("%", " %"))
        for label, name, form in _EVIDENCE
        if (values := run.series(name)[1])
    ]
    return [*rows, *(evidence or [("evidence", "none: this run consulted no teacher")]), *_time_rows(run)]


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
    lines: list[tuple[str, str, str]] = []
    labels = (f"accuracy at temperature {run.temperature:g}", "greedy accuracy")
    for label, name in zip(labels, COUNTS, strict=True):
        if measured := run.accuracies(name):
            first, *_ = measured
            *_, last = measured.values()
            story = f"measured once, at step {first}"
            if found := accuracy_change(run, name):
                change, is_paired = found
                error = "" if change.error is None else f" ± {100 * change.error:.1f}"
                before = f"from {100 * measured[first].mean:.1f} %{_interval(measured[first])} at step {first}"
                story = f"{before}: {100 * change.mean:+.1f}{error} points{', paired by problem' if is_paired else ''}"
            lines.append((f"{100 * last.mean:.1f} %", label + _interval(last), story))
    return lines


def accuracy_change(run: RunData, name: str = "val/accuracy") -> tuple[Cell, bool] | None:
    """Returns the change from the first to the last validation, and whether its error is that of the mean over problems.

    Otherwise the error is that of independent samples, which is too large for validations of the same problems, or None
    without the number of samples. The result is None if fewer than two validations were made.
    """
    measured = run.accuracies(name)
    if len(measured) < 2:
        return None
    (first, before), *_, (last, after) = measured.items()
    change, differences = after.less(before), _paired_differences(run, name, (first, last))
    return (replace(change, error=Cell.over(differences).error), True) if len(differences) > 1 else (change, False)


def _paired_differences(run: RunData, name: str, steps: tuple[int, int]) -> list[float]:
    """Returns the change of each problem's mean; empty unless all samples of both validations are recorded."""
    key, counts = name.removeprefix("val/"), run.values_by_step(COUNTS[name])
    found: list[dict[str, list[float]]] = [collections.defaultdict(list) for _ in steps]
    for row in read_generations(run.folder):
        if row["step"] in steps and isinstance(row.get(key), int | float):
            found[steps.index(row["step"])][row["prompt_id"]].append(row[key])
    before, after = found
    recorded = [sum(map(len, samples.values())) for samples in found]
    if recorded != [counts.get(step) for step in steps] or before.keys() != after.keys():
        return []
    return [statistics.fmean(after[problem]) - statistics.fmean(before[problem]) for problem in before]


def _interval(cell: Cell) -> str:
    return "" if cell.low is None or cell.high is None else f" ({100 * cell.low:.1f} to {100 * cell.high:.1f})"


def _time_rows(run: RunData) -> Iterator[tuple[str, str]]:
    for stage in (*STAGES, "step"):
        measured = run.values_by_step(f"timing_s/{stage}").items()
        values = [value for step, value in measured if step > 0 and value > 0]
        if not values:
            continue
        tokens = {} if stage == "score" else run.values_by_step(f"tokens/{stage}")  # teachers may be scored with it
        times = f", {len(values)} times" if stage in ("validate", "save") else ""
        counted = [(tokens[step], seconds) for step, seconds in measured if step in tokens and seconds > 0]
        speed = f", {sum(n for n, _ in counted) / sum(s for _, s in counted):,.0f} tokens/s" if counted else ""
        shown = f"{statistics.median(values):.2f} s{times}{speed}"
        yield "whole step, median" if stage == "step" else f"{stage}, median", shown
