"""Writes the page of a run: a summary, curves, the credit of its tokens, samples, settings and versions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from cepo.algorithms import available_estimators
from cepo.config.listing import method_settings, settings_of
from cepo.report.charts import save_figure
from cepo.report.credit_view import credit_view
from cepo.report.curves import run_charts
from cepo.report.html import Section, Table, write_page
from cepo.report.recorded_run import RunData, load_run
from cepo.report.summary import summary_rows
from cepo.tracking.run_folder import read_environment, read_generations
from cepo.trees import leaves

REPORT_FILE = "report.html"
_MOST_SAMPLES = 500


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, by default `report.html` in its folder, and returns the file's path.

    Raises:
        DataError: the folder or its metrics are missing or broken.
    """
    run = load_run(Path(run_folder))
    page = run.folder / REPORT_FILE if out is None else Path(out)
    sections = [Section(title=heading, charts=charts) for heading, charts in run_charts(run).items()]
    return write_page(
        page,
        title=f"{run.estimator}: {run.name}",
        facts=summary_rows(run) if run.rows else [],
        sections=[*sections, *_records(run)],
        credit=credit_view(run, page),
    )


def save_curves(run_folder: Path, out: Path) -> Path:
    """Draws a run's charts into one PNG, PDF or SVG file; returns its path; raises `DataError` as `write_report`."""
    charts = run_charts(load_run(Path(run_folder)))
    return save_figure([chart for part in charts.values() for chart in part], Path(out))


def _records(run: RunData) -> Iterator[Section]:
    samples = list(read_generations(run.folder))
    if samples:
        head = list(dict.fromkeys(name for row in samples for name in row))
        newest = [[row.get(name) for name in head] for row in reversed(samples[-_MOST_SAMPLES:])]
        note = f"the newest {len(newest)} of {len(samples)}, sampled at temperature {run.temperature(validation=True)}"
        yield Section(title="Validation samples", notes=[note], tables=[Table(head=head, rows=newest)], closed=True)
    yield Section(title="All metrics", tables=[_metrics_table(run)], closed=True)
    yield Section(title="Configuration", tables=list(_config_tables(run)), closed=True)
    starts = [dict(leaves(entry)) for entry in read_environment(run.folder)]
    keys = list(dict.fromkeys(key for start in starts for key in start))
    head = ["", *(f"start {number}" for number in range(1, len(starts) + 1))]
    rows = [[key, *(str(start.get(key, "")) for start in starts)] for key in keys]
    yield Section(title="Versions and machine", tables=[Table(head=head, rows=rows)] if rows else [], closed=True)


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
    rows = [[key, str(value), str(defaults.get(key, "required"))] for key, value in own.items()]
    yield Table(caption="differs from the defaults", head=["setting", "value", "default"], rows=rows)
    rest = [[key, str(value)] for key, value in values.items() if key not in own]
    yield Table(caption="as by default", head=["setting", "value"], rows=rest)
