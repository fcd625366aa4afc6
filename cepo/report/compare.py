"""Compares runs; runs that differ only in their seeds count as repeats of one setting."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from cepo.algorithms.registry import SHARED
from cepo.config.listing import REQUIRED, settings_of
from cepo.errors import DataError
from cepo.files.trees import leaves
from cepo.report.drawing import Chart, Section, Series, Table, scores, write_page
from cepo.report.recorded_run import (
    COUNTS,
    UNKNOWN_ESTIMATOR,
    RunData,
    as_yaml,
    chart_sections,
    load_run,
    planned_charts,
    series_of,
    words,
)
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow

_METHOD, _UNSET = "algorithm.adv_estimator", "not set"
_ACCURACY, _GREEDY = COUNTS
# Beginnings of the settings that cannot change what is trained or how it is measured: names, records, waiting.
_MAY_DIFFER = (
    *("trainer.experiment_name", "trainer.project_name", "trainer.logger", "trainer.save_", "trainer.launcher"),
    *("trainer.load_checkpoint_path", "trainer.find_last_checkpoint", "trainer.accept_changes", "trainer.rollouts_"),
    *("trainer.val_generations_to_log", "trainer.val_freq", "trainer.val_before_train", "trainer.start_timeout"),
    *("trainer.stage_timeout", "trainer.ray_address", "trainer.max_restarts"),
)
_LONGEST_LABEL = 28
_LARGEST_FOLDER = 50_000_000
"""Of the folders that are compared by content, such as the built-in toy task's model, whose path names cepo's version."""
_COLUMNS = (
    *(Column(name="runs"), Column(name="steps"), Column(name="before")),
    *(Column(name="after", is_ranked=True), Column(name="greedy after", is_ranked=True)),
    *(Column(name="difference", signed=True), Column(name="seconds a step")),
    *(Column(name="overhead %", digits=1, signed=True), Column(name="hours")),
)


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seeds. `label` names the method and what distinguishes it from other settings."""

    label: str
    runs: tuple[RunData, ...] = field(repr=False)

    def at_end(self, name: str, *, before: bool = False) -> Cell | str:
        """Returns the mean over runs of their last accuracies, in percent, after or before training; empty if a run has none."""
        measured = [
            [value for step, value in run.accuracies(name).items() if (step == 0) == before] for run in self.runs
        ]
        if not all(measured):
            return ""
        cell = Cell.over([100 * values[-1].mean for values in measured])
        alone = measured[0][-1].error if len(measured) == 1 else None
        return cell if alone is None else replace(cell, error=100 * alone)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings in the order of their first run, and notes on how far their numbers can be compared."""

    settings: tuple[Setting, ...]
    differing: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]

    def table(self) -> ScoreTable:
        """Returns accuracies in percent, differences from the first setting, and times."""
        temperatures = sorted({str(run.temperature) for setting in self.settings for run in setting.runs})
        return ScoreTable(
            title=f"Held-out accuracy in % at temperature {', '.join(temperatures)} and greedy, ± standard error",
            columns=_COLUMNS,
            rows=[TableRow(name=setting.label, cells=self._cells(setting)) for setting in self.settings],
            notes=self.notes,
        )

    def _cells(self, setting: Setting) -> dict[str, Cell | str]:
        first, lasts = self.settings[0], sorted(run.last_step for run in setting.runs)
        seconds, other = _seconds_per_step(setting), _seconds_per_step(first)
        cells: dict[str, Cell | str] = {
            "runs": str(len(setting.runs)),
            "steps": " to ".join(map(str, dict.fromkeys((lasts[0], lasts[-1])))),
            "before": setting.at_end(_ACCURACY, before=True),
            "after": setting.at_end(_ACCURACY),
            "greedy after": setting.at_end(_GREEDY),
            "seconds a step": seconds,
            "hours": Cell.over([run.seconds / 3600 for run in setting.runs]),
        }
        if setting is not first:
            cells["difference"] = paired_difference(first, setting)
            if isinstance(seconds, Cell) and isinstance(other, Cell):
                cells["overhead %"] = Cell(mean=100 * (seconds.mean / other.mean - 1))
        return cells

    def settings_table(self) -> list[list[str]]:
        """Returns what differs between the settings, and the names of their runs, with a head as the first row."""
        names = [", ".join(run.name for run in setting.runs) for setting in self.settings]
        head = ["setting", *(setting.label for setting in self.settings)]
        return [head, ["runs", *names], *([key, *values] for key, values in self.differing.items())]

    def charts(self) -> list[Chart]:
        """Returns a chart of each metric that any run has, with the curves of all settings."""
        charts: list[Chart] = []
        are_several = any(len(setting.runs) > 1 for setting in self.settings)
        note = "of several runs the mean, and a band from the lowest to the highest" if are_several else ""
        known = sorted({name for setting in self.settings for run in setting.runs for name in run.names()})
        for chart, names in planned_charts(known):
            for name in names:
                title = chart.title if len(names) == 1 else f"{chart.title}: {words(name)[0]}"
                series = [one for setting in self.settings for one in _curves(setting, name)]
                charts.append(replace(chart, title=title, series=series, note=note))
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
            raise DataError(f"{run.folder}/config.yaml does not set {_METHOD}; runs are grouped by their settings")
    configs = _configs(runs)
    differing = [key for key in sorted({*chain(*configs)}) if _differs(key, configs)]
    grouped: dict[tuple[str, ...], list[RunData]] = {}
    for run, config in zip(runs, configs, strict=True):
        grouped.setdefault(tuple(config.get(key, _UNSET) for key in differing), []).append(run)
    labels = _labels([members[0].estimator for members in grouped.values()], list(grouped), differing)
    settings = tuple(map(Setting, labels, map(tuple, grouped.values())))
    table = {key: [values[place] for values in grouped] for place, key in enumerate(differing)}
    return Comparison(settings=settings, differing=table, notes=tuple(_notes(settings, table)))


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Writes a comparison as an HTML page and returns its path."""
    head, *settings = comparison.settings_table()
    return write_page(
        out,
        title=f"Comparison of {sum(len(setting.runs) for setting in comparison.settings)} runs",
        sections=[
            Section(title="Result", closed=False, tables=[scores(comparison.table(), first="setting")]),
            Section(title="Runs and what differs", closed=False, tables=[Table(head=head, rows=settings)]),
            Section(title="Notes", closed=False, notes=comparison.notes),
            *chart_sections(comparison.charts()),
        ],
    )


def paired_difference(first: Setting, second: Setting) -> Cell | str:
    """Returns the mean difference in accuracy, second minus first, in percentage points.

    Runs with equal seeds form pairs, which are compared at the last validation that both made. Empty if a pair has no
    common validation after the start of training. Without pairs, the result is the difference of the means at each
    run's end. With fewer than two pairs the error is that of two independent means.
    """
    before, after = first.at_end(_ACCURACY), second.at_end(_ACCURACY)
    if isinstance(before, str) or isinstance(after, str):
        return ""
    independent = after.less(before)
    partners = {_seeds(run): run for run in first.runs}
    pairs = [(partners[seed], run) for run in second.runs if (seed := _seeds(run)) in partners]
    if not pairs:
        return independent
    measured = [(one.values_by_step(_ACCURACY), other.values_by_step(_ACCURACY)) for one, other in pairs]
    ends = [max((step for step in one.keys() & other.keys() if step > 0), default=0) for one, other in measured]
    if 0 in ends:
        return ""
    paired = Cell.over([100 * (other[end] - one[end]) for (one, other), end in zip(measured, ends, strict=True)])
    return paired if len(pairs) > 1 else replace(paired, error=independent.error)


def _curves(setting: Setting, name: str) -> Iterator[Series]:
    """Yields the mean of the runs over the steps that all of them measured; without such a curve, one curve per run."""
    import pandas

    runs = [run for run in setting.runs if run.series(name)[0]]
    measured = pandas.DataFrame([run.values_by_step(name) for run in runs])
    shared = measured.dropna(axis=1).sort_index(axis=1)
    if len(runs) > 1 and len(shared.columns) >= min(2, len(measured.columns)):
        values, low, high = (found.tolist() for found in (shared.mean(), shared.min(), shared.max()))
        yield Series(label=setting.label, steps=shared.columns.tolist(), values=values, low=low, high=high)
        return
    for run in runs:
        label = setting.label if len(runs) == 1 else f"{setting.label}: {run.name}"
        band = {} if len(runs) == 1 and name in COUNTS else {"low": (), "high": ()}
        yield replace(series_of(run, name), label=label, **band)


def _seconds_per_step(setting: Setting) -> Cell | str:
    medians = [statistics.median(values) for run in setting.runs if (values := run.series("timing_s/step")[1])]
    return Cell.over(medians) if medians and min(medians) > 0 else ""


def _configs(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Returns the settings of each run as text, with defaults, and what a path names by its content, however it is spelt."""
    listed = [each for each in settings_of() if each.default is not REQUIRED and not _is_of_methods(each.key)]
    defaults = {each.key: as_yaml(each.default) for each in listed}
    configs = [defaults | {key: as_yaml(value) for key, value in leaves(run.config)} for run in runs]
    spelt: dict[str, str] = {}
    for config in configs:
        for key, value in config.items():
            path, colon, name = value.rpartition(":") if ":" in value else (value, "", "")
            longer = [other[key] for other in configs if other.get(key, "").endswith(f"/{value}")]
            if "/" in value and (content := _content(Path(path))):
                config[key] = spelt.setdefault(f"{key} {content}{colon}{name}", value)
            elif longer:  # a relative path, from a folder that this machine does not know
                config[key] = longer[0]
    return configs


def _content(path: Path) -> str:
    """Returns the digest of a file or of a small folder of files, and nothing for what cannot be read here."""
    found: list[str] = []
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        if not all(map(Path.is_file, files)) or (path.is_dir() and size > _LARGEST_FOLDER):
            return ""
        for file in files:
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
            found.append(f"{file.name} {content}" if path.is_dir() else content)
    except OSError:
        return ""
    return " ".join(found)


def _differs(key: str, configs: Sequence[Mapping[str, str]]) -> bool:
    """Returns whether runs differ in a setting that can change training; in one of some methods, between their runs."""
    values = {config.get(key, _UNSET) for config in configs if key in config or not _is_of_methods(key)}
    return len(values) > 1 and not _is_seed(key) and not key.startswith(_MAY_DIFFER)


def _is_of_methods(key: str) -> bool:
    """Returns whether only some methods read a setting, so that the runs of others do not record it."""
    section, _, name = key.partition(".")
    return section == "algorithm" and ("." in name or name in SHARED)


def _labels(methods: Sequence[str], values: Sequence[Sequence[str]], keys: Sequence[str]) -> Iterator[str]:
    """Yields a short label per setting: its method, then the value that differs within the method, or else a number."""
    for method, own in zip(methods, values, strict=True):
        same = [other for other, name in zip(values, methods, strict=True) if name == method]
        places = [place for place in range(len(keys)) if len({other[place] for other in same}) > 1]
        named = [f"{method}, {keys[place].rpartition('.')[2]}={own[place]}" for place in places]
        is_short = len(named) == 1 and len(named[0]) <= _LONGEST_LABEL
        yield method if not places else named[0] if is_short else f"{method} ({same.index(own) + 1})"


def _notes(settings: Sequence[Setting], differing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield (
        "Errors are standard errors over runs, and of a single run Wilson's over its samples. The difference is "
        "from the first row, paired by seed, at the last validation that both runs made, and of a single pair its error "
        "is that of independent samples; seconds are medians over steps."
    )
    first, lasts = settings[0], set[int]()
    for setting in settings:
        seeds = [_seeds(run) for run in setting.runs]
        ends = {run.name: max(run.series(_ACCURACY)[0], default=0) for run in setting.runs}
        lasts |= {*ends.values()} - {0}
        if missing := [name for name, end in ends.items() if end == 0]:
            yield f"{setting.label}: {', '.join(missing)} made no validation after training."
        if len(set(seeds)) < len(seeds):
            yield f"Some runs of {setting.label} have the same seeds: they are not independent."
        if setting is not first and not {_seeds(run) for run in first.runs} & set(seeds):
            yield f"{setting.label} has no seed in common with {first.label}: its difference is not paired."
    if len(lasts) > 1:
        steps = ", ".join(map(str, sorted(lasts)))
        yield f"The last validations were made at different steps ({steps}): not all accuracies after training are comparable."
    others = [key for key in differing if key != _METHOD and not key.startswith("algorithm.")]
    if others and len({setting.runs[0].estimator for setting in settings}) > 1:
        yield f"More than the method differs: {', '.join(others)}."


def _seeds(run: RunData) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in leaves(run.config) if _is_seed(key)))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
