"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cepo.algorithms import available_estimators
from cepo.config.listing import REQUIRED, method_settings, settings_of
from cepo.report.charts import Chart, save_figure
from cepo.report.credit_view import credit_view
from cepo.report.curves import HELD_OUT, LEARNING, run_charts
from cepo.report.html import Sample, Section, Story, Table, samples_table, write_page
from cepo.report.recorded_run import RunData, as_yaml, load_run
from cepo.report.summary import result_lines, subtitle, summary_rows
from cepo.tracking.run_folder import read_environment, read_generations
from cepo.trees import Fields, leaves

REPORT_FILE = "report.html"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, by default `report.html` in its folder, and returns the file's path.

    Raises:
        DataError: the folder or its metrics are missing or broken.
    """
    run = load_run(run_folder)
    page = run.folder / REPORT_FILE if out is None else Path(out)
    charts = run_charts(run)
    first = [chart for chart in charts.get(LEARNING, ()) if chart.title == HELD_OUT]
    sections = chart_sections(
        {heading: [one for one in listed if one not in first] for heading, listed in charts.items()}
    )
    return write_page(
        page,
        title=run.name,
        story=Story(subtitle=subtitle(run), results=result_lines(run), chart=first[0] if first else None),
        sections=[*sections, *_records(run)],
        credit=credit_view(run, page),
        clocks=_clocks(run),
    )


def save_curves(run_folder: Path, out: Path) -> Path:
    """Draws a run's charts into one PNG, PDF or SVG file; returns its path; raises `DataError` as `write_report`."""
    return save_figure([*itertools.chain(*run_charts(load_run(run_folder)).values())], Path(out))


def chart_sections(charts: Mapping[str, Sequence[Chart]]) -> Iterator[Section]:
    """Yields the parts of a page with charts by heading, the first one open; series that are always 0 are named only."""
    for heading, listed in charts.items():
        zeros = [f"{chart.title} ({one.label})" for chart in listed for one in chart.series if not any(one.values)]
        yield Section(
            title=heading,
            charts=[drawn for chart in listed if (drawn := chart.without_zeros())],
            notes=[f"Always 0, and not drawn: {', '.join(zeros)}."] if zeros else [],
            closed=heading != LEARNING,
        )


def _clocks(run: RunData) -> dict[str, dict[int, float]]:
    """Returns the tokens that were generated, and the minutes that passed, up to each step."""
    clocks: dict[str, dict[int, float]] = {}
    for name, metric, unit in (("tokens", "tokens/generate", 1), ("minutes", "timing_s/step", 60)):
        steps, values = run.series(metric)
        if steps:
            clocks[name] = {0: 0.0} | dict(
                zip(steps, itertools.accumulate(value / unit for value in values), strict=True)
            )
    return clocks


def _records(run: RunData) -> Iterator[Section]:
    samples = list(read_generations(run.folder))
    starts = [dict(leaves(entry)) for entry in read_environment(run.folder)]
    rows = [[key, *(str(start.get(key, "")) for start in starts)] for key in dict.fromkeys(itertools.chain(*starts))]
    versions = Table(head=["entry", *(f"start {number}" for number, _ in enumerate(starts, 1))], rows=rows)
    for title, tables in {
        "Samples": [_samples_table(samples)] if samples else [],
        "Summary": [Table(head=["quantity", "value"], rows=summary_rows(run))] if run.rows else [],
        "All metrics": [_metrics_table(run)],
        "Configuration": [*_config_tables(run)],
        "Versions": [versions] if rows else [],
    }.items():
        if tables:
            yield Section(title=title, tables=tables)


def _samples_table(samples: Sequence[Fields]) -> Table:
    """Returns each problem's responses at the first and at the last validation."""
    steps = sorted({row["step"] for row in samples})
    counts = collections.Counter[tuple[int, str]]()
    measured: dict[str, list[Sample]] = {f"at step {step}": [] for step in (steps[0], steps[-1])}
    for row in samples:
        if (of_step := measured.get(f"at step {row['step']}")) is not None:
            counts[row["step"], row["prompt_id"]] += 1
            name = f"{row['prompt_id']} {counts[row['step'], row['prompt_id']]}"
            of_step.append((name, row["accuracy"] >= 0.5, row))
    return samples_table(measured)


def _metrics_table(run: RunData) -> Table:
    rows: list[Sequence[str | float]] = []
    for name in run.names():
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


def _default(value: object) -> str:
    return "required" if value is REQUIRED else as_yaml(value)
