"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.algorithms import available_estimators
from cepo.config.listing import REQUIRED, method_settings, settings_of
from cepo.report.charts import Chart, save_figure
from cepo.report.credit_view import credit_view
from cepo.report.curves import HELD_OUT, run_charts
from cepo.report.html import Sample, Section, Story, Table, samples_table, write_page
from cepo.report.recorded_run import RunData, as_yaml, load_run
from cepo.report.summary import result_lines, subtitle, summary_rows
from cepo.tracking.run_folder import read_environment, read_generations
from cepo.trees import leaves

REPORT_FILE = "report.html"
_SAMPLE_TEXTS = {"problem": "problem", "answer": "ground_truth", "response": "response"}


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, by default `report.html` in its folder, and returns the file's path.

    Raises:
        DataError: the folder or its metrics are missing or broken.
    """
    run = load_run(Path(run_folder))
    page = run.folder / REPORT_FILE if out is None else Path(out)
    charts = run_charts(run)
    learning = charts.get("Learning", [])
    held_out = next((chart for chart in learning if chart.title == HELD_OUT), None)
    if held_out is not None:
        learning.remove(held_out)
    sections = [
        Section(
            title=heading,
            charts=[drawn for chart in listed if (drawn := chart.without_zeros())],
            notes=[*_zeros(listed)],
            closed=place > 0,
        )
        for place, (heading, listed) in enumerate(charts.items())
        if listed
    ]
    return write_page(
        page,
        title=run.name,
        story=Story(subtitle=subtitle(run), results=result_lines(run), chart=held_out),
        sections=[*sections, *_records(run)],
        credit=credit_view(run, page),
        clocks=_clocks(run),
    )


def save_curves(run_folder: Path, out: Path) -> Path:
    """Draws a run's charts into one PNG, PDF or SVG file; returns its path; raises `DataError` as `write_report`."""
    charts = run_charts(load_run(Path(run_folder)))
    return save_figure([chart for part in charts.values() for chart in part], Path(out))


def _zeros(charts: Sequence[Chart]) -> Iterator[str]:
    names = [f"{chart.title} ({one.label})" for chart in charts for one in chart.series if not any(one.values)]
    if names:
        yield f"Always 0, and not drawn: {', '.join(names)}."


def _clocks(run: RunData) -> dict[str, dict[int, float]]:
    """Returns the tokens that were generated, and the minutes that passed, up to each step."""
    clocks: dict[str, dict[int, float]] = {}
    for name, metric, unit in (("tokens", "tokens/generate", 1), ("minutes", "timing_s/step", 60)):
        steps, values = run.series(metric)
        if steps:
            sums = (value / unit for value in itertools.accumulate(values))
            clocks[name] = {0: 0.0} | dict(zip(steps, sums, strict=True))
    return clocks


def _records(run: RunData) -> Iterator[Section]:
    samples = list(read_generations(run.folder))
    if samples:
        yield Section(title="Validation samples", tables=[_samples_table(samples)])
    if run.rows:
        yield Section(title="Summary and timings", tables=[Table(head=["quantity", "value"], rows=summary_rows(run))])
    yield Section(title="All metrics", tables=[_metrics_table(run)])
    yield Section(title="Configuration", tables=list(_config_tables(run)))
    starts = [dict(leaves(entry)) for entry in read_environment(run.folder)]
    keys = list(dict.fromkeys(key for start in starts for key in start))
    head = ["entry", *(f"start {number}" for number in range(1, len(starts) + 1))]
    rows = [[key, *(str(start.get(key, "")) for start in starts)] for key in keys]
    yield Section(title="Versions and machine", tables=[Table(head=head, rows=rows)] if rows else [])


def _samples_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Returns each problem's responses at the first and at the last validation."""
    steps = dict.fromkeys((min(row["step"] for row in samples), max(row["step"] for row in samples)))
    counts = collections.Counter[tuple[int, str]]()
    measured: dict[str, list[Sample]] = {f"at step {step}": [] for step in steps}
    for row in samples:
        if row["step"] in steps:
            counts[row["step"], row["prompt_id"]] += 1
            texts = {name: str(row.get(key, "")) for name, key in _SAMPLE_TEXTS.items()}
            name = f"{row['prompt_id']} {counts[row['step'], row['prompt_id']]}"
            sample = Sample(name=name, right=row["accuracy"] >= 0.5, image=str(row.get("image")), **texts)
            measured[f"at step {row['step']}"].append(sample)
    return samples_table(measured)


def _metrics_table(run: RunData) -> Table:
    rows: list[Sequence[str | float]] = []
    for name in run.names(""):
        steps, values = run.series(name)
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        mean = math.fsum(finite) / len(finite)
        rows.append([name, len(values), values[0], values[-1], min(finite), max(finite), mean, steps[-1]])
    return Table(head=["metric", "measured", "first", "last", "lowest", "highest", "mean", "last step"], rows=rows)


def _config_tables(run: RunData) -> Iterator[Table]:
    settings = [*settings_of(), *(method_settings(run.estimator) if run.estimator in available_estimators() else [])]
    defaults = {setting.key: setting.default for setting in settings}
    values = dict(leaves(run.config))
    own = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    rows = [[key, as_yaml(value), _default(defaults.get(key, REQUIRED))] for key, value in own.items()]
    yield Table(caption="settings that differ from the defaults", head=["setting", "value", "default"], rows=rows)
    rest = [[key, as_yaml(value)] for key, value in values.items() if key not in own]
    yield Table(caption="settings as by default", head=["setting", "value"], rows=rest)


def _default(value: Any) -> str:
    return "required" if value is REQUIRED else as_yaml(value)
