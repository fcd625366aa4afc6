"""Compares runs; runs that differ only in their seeds count as repeats of one setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from cepo.errors import DataError
from cepo.report.charts import HELD_OUT, chart_sections, planned_charts, series_of, words
from cepo.report.comparison_sentence import cautions_of, headline_of, notes_of, unit_of_errors
from cepo.report.drawing import Chart, Series
from cepo.report.html_page import Section, Table, table_of_scores, write_page
from cepo.report.recorded_run import COUNTS, UNKNOWN_ESTIMATOR, RunData, load_run
from cepo.report.run_group import (
    ACCURACY,
    GREEDY,
    METHOD,
    UNSET,
    RunGroup,
    configs_of,
    differing_keys,
    labels_of,
    paired_difference,
)
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow, terminal_table

_COLUMNS = (
    Column(name="runs"),
    Column(name="steps"),
    Column(name="before"),
    Column(name="after", is_ranked=True),
    Column(name="greedy after", is_ranked=True),
    Column(name="difference", signed=True),
    Column(name="seconds a step"),
    Column(name="overhead %", digits=1, signed=True),
    Column(name="hours"),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings in the order of their first run, and what differs between them."""

    settings: tuple[RunGroup, ...]
    differing: Mapping[str, Sequence[str]]

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return headline_of(self.settings)

    @property
    def cautions(self) -> list[str]:
        """What speaks against comparing the settings."""
        return list(cautions_of(self.settings, self.differing))

    @property
    def notes(self) -> list[str]:
        """How the numbers of the table were computed."""
        return list(notes_of(self.settings))

    def table(self) -> ScoreTable:
        """Returns accuracies in percent, differences from the first setting, and times."""
        temperatures = sorted({str(run.temperature) for run in self._runs()})
        return ScoreTable(
            title=(
                f"Held-out accuracy in % at temperature {', '.join(temperatures)} and greedy, ± standard error over "
                f"{unit_of_errors(self.settings)}"
            ),
            columns=_COLUMNS,
            rows=[TableRow(name=setting.label, cells=self._cells(setting)) for setting in self.settings],
            notes=[self.headline, *self.cautions, *self.notes],
        )

    def _cells(self, setting: RunGroup) -> dict[str, Cell | str]:
        first = self.settings[0]
        seconds = setting.seconds_per_step
        seconds_of_first = first.seconds_per_step
        last_steps = [run.last_step for run in setting.runs]
        least = min(last_steps)
        most = max(last_steps)
        cells: dict[str, Cell | str] = {
            "runs": str(len(setting.runs)),
            "steps": str(least) if least == most else f"{least} to {most}",
            "before": setting.at_end(ACCURACY, before=True),
            "after": setting.at_end(ACCURACY),
            "greedy after": setting.at_end(GREEDY),
            "seconds a step": seconds,
            "hours": Cell.over([run.seconds / 3600 for run in setting.runs]),
        }
        if setting is not first:
            cells["difference"] = paired_difference(first, setting)
            if isinstance(seconds, Cell) and isinstance(seconds_of_first, Cell):
                cells["overhead %"] = Cell(mean=100 * (seconds.mean / seconds_of_first.mean - 1))
        return cells

    def _runs(self) -> Iterator[RunData]:
        for setting in self.settings:
            yield from setting.runs

    def terminal(self, width: int) -> Group:
        """Returns the verdict, the cautions, the table, and what differs, in rich's form."""
        parts: list[RenderableType] = [Text(self.headline, style="bold")]
        parts += [Text(f"Caution: {caution}", style="yellow") for caution in self.cautions]
        parts.append(Text())
        parts.append(replace(self.table(), notes=self.notes).terminal(width))
        if self.differing:
            parts.append(terminal_table(self.settings_table(), width))
        return Group(*parts)

    def settings_table(self) -> list[list[str]]:
        """Returns what differs between the settings, and the names of their runs, with a head as the first row."""
        head = ["setting"]
        names = ["runs"]
        for setting in self.settings:
            head.append(setting.label)
            names.append(", ".join(run.name for run in setting.runs))
        table = [head, names]
        for key, values in self.differing.items():
            table.append([key, *values])
        return table

    def charts(self) -> list[Chart]:
        """Returns a chart of each metric that any run has, with the curves of all settings."""
        charts: list[Chart] = []
        are_several = any(len(setting.runs) > 1 for setting in self.settings)
        note = "of several runs the mean, and a band from the lowest to the highest" if are_several else ""
        known = sorted({name for run in self._runs() for name in run.curves})
        for chart, names in planned_charts(known):
            for name in names:
                label, _ = words(name)
                title = chart.title if len(names) == 1 else f"{chart.title}: {label}"
                curves: list[Series] = []
                for setting in self.settings:
                    curves += _curves(setting, name)
                charts.append(replace(chart, title=title, series=curves, note=note))
        return charts


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Groups runs by all settings in which they differ, apart from seeds, names, paths and loggers.

    Raises `DataError` if a folder, its metrics or its configuration is missing.
    """
    runs = [load_run(folder) for folder in folders]
    for run in runs:
        if not run.rows:
            raise DataError(
                f"{run.folder}/metrics.jsonl has no rows yet; wait for the first step, or leave the run out"
            )
        if run.estimator == UNKNOWN_ESTIMATOR:
            raise DataError(f"{run.folder}/config.yaml does not set {METHOD}; runs are grouped by their settings")
    configs = configs_of(runs)
    differing = differing_keys(configs)
    runs_by_values: dict[tuple[str, ...], list[RunData]] = {}
    for run, config in zip(runs, configs, strict=True):
        values = tuple(config.get(key, UNSET) for key in differing)
        runs_by_values.setdefault(values, []).append(run)
    methods = [members[0].estimator for members in runs_by_values.values()]
    labels = labels_of(methods, list(runs_by_values), differing)
    settings: list[RunGroup] = []
    for label, members in zip(labels, runs_by_values.values(), strict=True):
        settings.append(RunGroup(label, tuple(members)))
    table: dict[str, list[str]] = {}
    for place, key in enumerate(differing):
        table[key] = [values[place] for values in runs_by_values]
    return Comparison(settings=tuple(settings), differing=table)


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Writes a comparison as an HTML page, with the verdict first, and returns its path."""
    head, *rows = comparison.settings_table()
    charts = comparison.charts()
    first = charts.pop(0) if charts and charts[0].title.startswith(HELD_OUT) else None
    num_runs = sum(len(setting.runs) for setting in comparison.settings)
    table = table_of_scores(comparison.table(), first="setting")
    return write_page(
        out,
        title=f"Comparison of {num_runs} runs",
        headline=comparison.headline,
        warnings=comparison.cautions,
        first=first,
        sections=[
            Section(title="Result", closed=False, tables=[table]),
            Section(title="Runs and what differs", closed=False, tables=[Table(head=head, rows=rows)]),
            *chart_sections(charts),
            Section(title="How it was computed", notes=comparison.notes),
        ],
    )


def _curves(setting: RunGroup, name: str) -> Iterator[Series]:
    """Yields the mean of the runs over the steps that all of them measured; without such a curve, one curve per run."""
    import pandas

    runs = [run for run in setting.runs if name in run.curves]
    measured = pandas.DataFrame([run.curves[name] for run in runs])
    shared = measured.dropna(axis=1).sort_index(axis=1)
    if len(runs) > 1 and len(shared.columns) >= min(2, len(measured.columns)):
        yield Series(
            label=setting.label,
            steps=shared.columns.tolist(),
            values=shared.mean().tolist(),
            low=shared.min().tolist(),
            high=shared.max().tolist(),
        )
        return
    for run in runs:
        label = setting.label if len(runs) == 1 else f"{setting.label}: {run.name}"
        curve = replace(series_of(run.curves, name), label=label)
        if len(runs) > 1 or name not in COUNTS:
            curve = replace(curve, low=(), high=())
        yield curve
