"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from cepo.algorithms import available_estimators
from cepo.config.listing import REQUIRED, method_settings, settings_of
from cepo.files.trees import leaves
from cepo.report.charts import HELD_OUT, chart_sections, charts_of
from cepo.report.credit_view import credit_view
from cepo.report.drawing import save_figure
from cepo.report.findings import diagnosed_run, findings_section
from cepo.report.html_page import Section, Table, write_page
from cepo.report.html_snippet import fragment
from cepo.report.recorded_run import RunData, as_yaml, load_run
from cepo.report.samples import Sample, samples_table
from cepo.report.summary import accuracies, page_results, subtitle, summary_rows
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import run_folder_of
from cepo.run_folder.records import read_generations
from cepo.sections.call_types import checks_types
from cepo.terminal.lines import without_controls

REPORT_FILE = "report.html"


class Run(RunData):
    """The records of a run, as they were when it was opened."""

    def page(self, out: Path | str | None = None) -> Path:
        """Writes the report of the run, by default `report.html` in its folder, and returns the file's path."""
        return write_report(self.folder, None if out is None else Path(out))

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the result, and a right and a wrong response with the credit of their tokens."""
        lines = [f"{self.estimator}: {self.name}, step {self.last_step}"]
        for accuracy in accuracies(self):
            lines.append(f"{accuracy.last} {accuracy.label}, {accuracy.change}")
        summary = "<br>".join(escape(line) for line in lines)
        view = credit_view(self)
        credit = "" if view is None else fragment(view.contrast, image=view.image)
        return f"<p>{without_controls(summary)}</p>\n{credit}"


@checks_types
def open_run(folder: Path | str) -> Run:
    """Opens a run folder, which may have no steps yet, or the one that a checkpoint lies in.

    Raises `DataError` if it or a file is missing or broken.
    """
    return Run(**vars(load_run(run_folder_of(Path(folder)))))


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run as `Run.page` does; raises `DataError` if the folder or its metrics are missing or broken."""
    run = load_run(run_folder)
    charts = charts_of(run.curves)
    first = charts.pop(0) if charts and charts[0].title == HELD_OUT else None
    return write_page(
        out or run.folder / REPORT_FILE,
        title=run.name,
        subtitle=subtitle(run),
        results=page_results(run),
        first=first,
        credit=credit_view(run),
        sections=[*chart_sections(charts), *_diagnosis(run), *_records(run)],
        clocks=_clocks(run),
    )


def save_curves(run_folder: Path, out: Path) -> Path:
    """Draws a run's charts into one PNG, PDF or SVG file; returns its path; raises `DataError` as `write_report`."""
    return save_figure(charts_of(load_run(run_folder).curves), out)


def _diagnosis(run: RunData) -> Iterator[Section]:
    """Yields why the run does not learn, once it has made steps."""
    if run.last_step > 0:
        yield findings_section(diagnosed_run(run))


def _clocks(run: RunData) -> dict[str, dict[int, float]]:
    """Returns the tokens that were generated, and the minutes that passed, up to each step."""
    clocks: dict[str, dict[int, float]] = {}
    for name, metric, unit in (("tokens", "tokens/generate", 1), ("minutes", "timing_s/step", 60)):
        values_by_step = run.values_by_step(metric)
        if not values_by_step:
            continue
        clock = {0: 0.0}
        total = 0.0
        for step, value in values_by_step.items():
            total += value / unit if math.isfinite(value) else 0.0
            clock[step] = total
        clocks[name] = clock
    return clocks


def _records(run: RunData) -> Iterator[Section]:
    samples = list(_samples_tables(run))
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
    names_of_starts = [f"start {number}" for number in range(1, len(starts) + 1)]
    keys = dict.fromkeys(itertools.chain.from_iterable(starts))
    rows = [[key, *(str(start.get(key, "")) for start in starts)] for key in keys]
    return Table(head=["entry", *names_of_starts], rows=rows)


def _samples_tables(run: RunData) -> Iterator[Table]:
    """Yields a table of each problem's responses at the first and at the last validation, if any are recorded."""
    samples_of_steps: dict[int, list[Sample]] = defaultdict(list)
    for row in read_generations(run.folder):
        sample = Sample(problem=row["prompt_id"], is_right=row["accuracy"] >= 0.5, row=row)
        samples_of_steps[row["step"]].append(sample)
    if not samples_of_steps:
        return
    samples_by_title: dict[str, list[Sample]] = {}
    for step in (min(samples_of_steps), max(samples_of_steps)):
        samples_by_title[f"at step {step}"] = samples_of_steps[step]
    yield samples_table(samples_by_title)


_METRIC_HEADINGS = ("metric", "measured", "first", "last", "lowest", "highest", "mean", "last step")


def _metrics_table(run: RunData) -> Table:
    rows: list[Sequence[str | float]] = []
    for name in sorted(run.curves):
        steps, values = run.series(name)
        finite_values = [value for value in values if math.isfinite(value)]
        lowest = highest = mean = math.nan
        if finite_values:
            lowest = min(finite_values)
            highest = max(finite_values)
            mean = math.fsum(finite_values) / len(finite_values)
        first = values[0]
        last = values[-1]
        rows.append([name, len(values), first, last, lowest, highest, mean, steps[-1]])
    return Table(head=_METRIC_HEADINGS, rows=rows)


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
