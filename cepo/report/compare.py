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

_METHOD = "algorithm.adv_estimator"
_UNSET = "not set"
_ACCURACY, _GREEDY = COUNTS
# Beginnings of the settings that cannot change what is trained or how it is measured: names, records, waiting.
_MAY_DIFFER = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.logger",
    "trainer.save_",
    "trainer.launcher",
    "trainer.load_checkpoint_path",
    "trainer.find_last_checkpoint",
    "trainer.accept_changes",
    "trainer.rollouts_",
    "trainer.val_generations_to_log",
    "trainer.val_freq",
    "trainer.val_before_train",
    "trainer.start_timeout",
    "trainer.stage_timeout",
    "trainer.ray_address",
    "trainer.max_restarts",
)
_LONGEST_LABEL = 28
_LARGEST_FOLDER = 50_000_000
"""Of the folders that are compared by content, such as the built-in toy task's model, whose path names cepo's version."""
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


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seeds. `label` names the method and what distinguishes it from other settings."""

    label: str
    runs: tuple[RunData, ...] = field(repr=False)

    def at_end(self, name: str, *, before: bool = False) -> Cell | str:
        """Returns the mean over runs of their last accuracies, in percent, after or before training; empty if a run has none."""
        last_accuracies: list[Cell] = []
        for run in self.runs:
            accuracies = [cell for step, cell in run.accuracies(name).items() if (step == 0) == before]
            if not accuracies:
                return ""
            last_accuracies.append(accuracies[-1])
        mean = Cell.over([100 * accuracy.mean for accuracy in last_accuracies])
        if len(last_accuracies) > 1 or last_accuracies[0].error is None:
            return mean
        # A single run has no error over runs, so that of its samples stands in.
        return replace(mean, error=100 * last_accuracies[0].error)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings in the order of their first run, and notes on how far their numbers can be compared."""

    settings: tuple[Setting, ...]
    differing: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]

    def table(self) -> ScoreTable:
        """Returns accuracies in percent, differences from the first setting, and times."""
        temperatures = sorted({str(run.temperature) for run in self._runs()})
        return ScoreTable(
            title=f"Held-out accuracy in % at temperature {', '.join(temperatures)} and greedy, ± standard error",
            columns=_COLUMNS,
            rows=[TableRow(name=setting.label, cells=self._cells(setting)) for setting in self.settings],
            notes=self.notes,
        )

    def _cells(self, setting: Setting) -> dict[str, Cell | str]:
        first = self.settings[0]
        seconds = _seconds_per_step(setting)
        seconds_of_first = _seconds_per_step(first)
        last_steps = [run.last_step for run in setting.runs]
        least = min(last_steps)
        most = max(last_steps)
        cells: dict[str, Cell | str] = {
            "runs": str(len(setting.runs)),
            "steps": str(least) if least == most else f"{least} to {most}",
            "before": setting.at_end(_ACCURACY, before=True),
            "after": setting.at_end(_ACCURACY),
            "greedy after": setting.at_end(_GREEDY),
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
        known: set[str] = set()
        for run in self._runs():
            known.update(run.names())
        for chart, names in planned_charts(sorted(known)):
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
            raise DataError(f"{run.folder}/config.yaml does not set {_METHOD}; runs are grouped by their settings")
    configs = _configs(runs)
    keys = sorted(set(chain.from_iterable(configs)))
    differing = [key for key in keys if _differs(key, configs)]
    runs_by_values: dict[tuple[str, ...], list[RunData]] = {}
    for run, config in zip(runs, configs, strict=True):
        values = tuple(config.get(key, _UNSET) for key in differing)
        runs_by_values.setdefault(values, []).append(run)
    methods = [members[0].estimator for members in runs_by_values.values()]
    labels = _labels(methods, list(runs_by_values), differing)
    settings: list[Setting] = []
    for label, members in zip(labels, runs_by_values.values(), strict=True):
        settings.append(Setting(label, tuple(members)))
    table: dict[str, list[str]] = {}
    for place, key in enumerate(differing):
        table[key] = [values[place] for values in runs_by_values]
    return Comparison(settings=tuple(settings), differing=table, notes=tuple(_notes(settings, table)))


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
    mean_of_first = first.at_end(_ACCURACY)
    mean_of_second = second.at_end(_ACCURACY)
    if isinstance(mean_of_first, str) or isinstance(mean_of_second, str):
        return ""
    independent = mean_of_second.less(mean_of_first)
    partners = {_seeds(run): run for run in first.runs}
    differences: list[float] = []
    for run in second.runs:
        partner = partners.get(_seeds(run))
        if partner is None:
            continue
        accuracies = run.values_by_step(_ACCURACY)
        partners_accuracies = partner.values_by_step(_ACCURACY)
        common_steps = [step for step in accuracies if step > 0 and step in partners_accuracies]
        if not common_steps:
            return ""
        last_step = max(common_steps)
        differences.append(100 * (accuracies[last_step] - partners_accuracies[last_step]))
    if not differences:
        return independent
    paired = Cell.over(differences)
    return paired if len(differences) > 1 else replace(paired, error=independent.error)


def _curves(setting: Setting, name: str) -> Iterator[Series]:
    """Yields the mean of the runs over the steps that all of them measured; without such a curve, one curve per run."""
    import pandas

    runs = [run for run in setting.runs if run.series(name)[0]]
    measured = pandas.DataFrame([run.values_by_step(name) for run in runs])
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
        curve = replace(series_of(run, name), label=label)
        if len(runs) > 1 or name not in COUNTS:
            curve = replace(curve, low=(), high=())
        yield curve


def _seconds_per_step(setting: Setting) -> Cell | str:
    medians: list[float] = []
    for run in setting.runs:
        _, seconds = run.series("timing_s/step")
        if seconds:
            medians.append(statistics.median(seconds))
    return Cell.over(medians) if medians and min(medians) > 0 else ""


def _configs(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Returns the settings of each run as text, with defaults, and what a path names by its content, however it is spelt."""
    defaults: dict[str, str] = {}
    for setting in settings_of():
        if setting.default is not REQUIRED and not _is_of_methods(setting.key):
            defaults[setting.key] = as_yaml(setting.default)
    configs: list[dict[str, str]] = []
    for run in runs:
        recorded = {key: as_yaml(value) for key, value in leaves(run.config)}
        configs.append(defaults | recorded)
    spellings: dict[str, str] = {}  # by key and content, the first spelling of a path
    for config in configs:
        for key, value in config.items():
            content = _content_of_path(value)
            longer = [other[key] for other in configs if other.get(key, "").endswith(f"/{value}")]
            if content:
                config[key] = spellings.setdefault(f"{key} {content}", value)
            elif longer:  # a relative path, from a folder that this machine does not know
                config[key] = longer[0]
    return configs


def _content_of_path(value: str) -> str:
    """Returns the digest of what a value such as `path` or `path:name` names, with the name; empty if it is no path."""
    if "/" not in value:
        return ""
    path, colon, name = value, "", ""
    if ":" in value:
        path, colon, name = value.rpartition(":")
    content = _content(Path(path))
    return f"{content}{colon}{name}" if content else ""


def _content(path: Path) -> str:
    """Returns the digest of a file or of a small folder of files, and nothing for what cannot be read here."""
    digests: list[str] = []
    try:
        is_folder = path.is_dir()
        files = sorted(path.iterdir()) if is_folder else [path]
        size = sum(file.stat().st_size for file in files)
        if is_folder and size > _LARGEST_FOLDER:
            return ""
        if not all(file.is_file() for file in files):
            return ""
        for file in files:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            digests.append(f"{file.name} {digest}" if is_folder else digest)
    except OSError:
        return ""
    return " ".join(digests)


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
    for method, values_of_setting in zip(methods, values, strict=True):
        values_of_method = [row for row, name in zip(values, methods, strict=True) if name == method]
        varied_places: list[int] = []
        for place in range(len(keys)):
            variants = {row[place] for row in values_of_method}
            if len(variants) > 1:
                varied_places.append(place)
        if not varied_places:
            yield method
            continue
        place = varied_places[0]
        _, _, name = keys[place].rpartition(".")
        label = f"{method}, {name}={values_of_setting[place]}"
        if len(varied_places) == 1 and len(label) <= _LONGEST_LABEL:
            yield label
        else:
            yield f"{method} ({values_of_method.index(values_of_setting) + 1})"


def _notes(settings: Sequence[Setting], differing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield (
        "Errors are standard errors over runs, and of a single run Wilson's over its samples. The difference is "
        "from the first row, paired by seed, at the last validation that both runs made, and of a single pair its error "
        "is that of independent samples; seconds are medians over steps."
    )
    first = settings[0]
    seeds_of_first = {_seeds(run) for run in first.runs}
    last_steps: set[int] = set()
    for setting in settings:
        seeds = {_seeds(run) for run in setting.runs}
        ends: dict[str, int] = {}
        for run in setting.runs:
            steps, _ = run.series(_ACCURACY)
            ends[run.name] = max(steps, default=0)
        last_steps.update(end for end in ends.values() if end > 0)
        unvalidated = [name for name, end in ends.items() if end == 0]
        if unvalidated:
            yield f"{setting.label}: {', '.join(unvalidated)} made no validation after training."
        if len(seeds) < len(setting.runs):
            yield f"Some runs of {setting.label} have the same seeds: they are not independent."
        if setting is not first and seeds.isdisjoint(seeds_of_first):
            yield f"{setting.label} has no seed in common with {first.label}: its difference is not paired."
    if len(last_steps) > 1:
        listed = ", ".join(map(str, sorted(last_steps)))
        yield f"The last validations were made at different steps ({listed}): not all accuracies after training are comparable."
    other_keys = [key for key in differing if key != _METHOD and not key.startswith("algorithm.")]
    methods = {setting.runs[0].estimator for setting in settings}
    if other_keys and len(methods) > 1:
        yield f"More than the method differs: {', '.join(other_keys)}."


def _seeds(run: RunData) -> tuple[tuple[str, str], ...]:
    seeds = [(key, str(value)) for key, value in leaves(run.config) if _is_seed(key)]
    return tuple(sorted(seeds))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
