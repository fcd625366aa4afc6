"""Compares runs; runs that differ only in their seeds count as repeats of one setting."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cepo.algorithms.base import SHARED
from cepo.config.listing import REQUIRED, settings_of
from cepo.errors import DataError
from cepo.report.charts import Chart, Series, save_figure
from cepo.report.curves import wilson_interval
from cepo.report.html import Section, Table, write_page
from cepo.report.recorded_run import UNKNOWN_ESTIMATOR, RunData, as_yaml, load_run
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow
from cepo.trees import leaves

_METHOD, _DATA = "algorithm.adv_estimator", "data.train_files"
_ACCURACY, _GREEDY = "val/accuracy", "val/greedy_accuracy"
# Beginnings of the settings that cannot change what is trained or how it is measured: names, records, waiting.
_MAY_DIFFER = (
    *(
        "trainer.experiment_name",
        "trainer.project_name",
        "trainer.logger",
        "trainer.save_",
        "trainer.load_checkpoint_path",
    ),
    *("trainer.find_last_checkpoint", "trainer.accept_changes", "trainer.rollouts_", "trainer.val_generations_to_log"),
    *("trainer.val_freq", "trainer.val_before_train", "trainer.start_timeout", "trainer.stage_timeout"),
    *("trainer.launcher", "trainer.ray_address", "trainer.max_restarts"),
)
_LONGEST_LABEL = 28
_CURVES = (
    ("Held-out accuracy", "fraction right", _ACCURACY),
    ("Held-out accuracy, greedy", "fraction right", _GREEDY),
    ("Training accuracy", "fraction right", "reward/correct"),
    ("Reward", "reward", "reward/mean"),
    ("Response length", "tokens", "response_length/mean"),
    ("Entropy", "nats per token", "rollout/entropy"),
    ("KL", "nats per token", "critic/kl"),
    ("Gradient norm", "norm before clipping", "actor/grad_norm"),
    ("Ratio clip rate", "fraction of tokens", "actor/pg_clipfrac_higher"),
    ("Positive evidence", "fraction of tokens", "evidence/positive_fraction"),
    ("Negative evidence", "fraction of tokens", "evidence/negative_fraction"),
    ("Weights clipped from above", "fraction of tokens", "evidence/clip_high_rate"),
    ("Weights clipped from below", "fraction of tokens", "evidence/clip_low_rate"),
    ("Mixed groups", "fraction of groups", "groups/mixed"),
    ("Log-prob gap of engine and trainer", "nats", "rollout/log_prob_gap_mean"),
    ("Seconds of a step", "seconds", "timing_s/step"),
)
_COLUMNS = (
    Column(name="runs", digits=0),
    Column(name="steps", digits=0),
    Column(name="before"),
    Column(name="after", is_ranked=True),
    Column(name="greedy after", is_ranked=True),
    Column(name="difference", signed=True),
    Column(name="seconds a step"),
    Column(name="overhead %", digits=1, signed=True),
    Column(name="hours"),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The values of one quantity over runs, or over other independent units."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean, `sd / sqrt(n)` with n - 1 in the variance; None for a single value or a NaN."""
        known = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if known else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ only in their seeds. `label` names the method and what distinguishes it from other settings."""

    label: str
    runs: tuple[RunData, ...] = field(repr=False)

    def last_step(self, run: RunData) -> int | None:
        """Returns the step of a run's last validation; None if it has none."""
        return run.series(_ACCURACY)[0][-1] if run.series(_ACCURACY)[0] else None

    def at_end(self, name: str, *, before: bool = False) -> Cell | str:
        """Returns the mean over runs of a validation metric, in percent, at each run's last measurement after training.

        With `before`, the one before training. Empty if a run has none.
        """
        measured = [
            [value for step, value in zip(*run.series(name), strict=True) if (step == 0) == before] for run in self.runs
        ]
        ends = [values[-1] for values in measured if values]
        if len(ends) < len(self.runs):
            return ""
        spread = Spread(values=tuple(ends))
        error = spread.error
        if error is None:
            counts = self.runs[0].series("val/num_samples" if name == _ACCURACY else "val/num_greedy_samples")[1]
            interval = wilson_interval(spread.mean, counts[-1] if counts else None)
            error = None if interval is None else (interval[1] - interval[0]) / 2
        return Cell(mean=100 * spread.mean, error=None if error is None else 100 * error)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings in the order of their first run, and notes on how far their numbers can be compared."""

    settings: tuple[Setting, ...]
    differing: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]

    def table(self) -> ScoreTable:
        """Returns accuracies in percent, differences from the first setting, and times."""
        runs = [run for setting in self.settings for run in setting.runs]
        temperatures = sorted({str(run.temperature(validation=True)) for run in runs})
        return ScoreTable(
            title=f"Held-out accuracy in % at temperature {', '.join(temperatures)} and greedy, ± standard error",
            columns=_COLUMNS,
            rows=[TableRow(name=setting.label, cells=self._cells(setting)) for setting in self.settings],
            notes=self.notes,
        )

    def _cells(self, setting: Setting) -> dict[str, Cell | str]:
        first = self.settings[0]
        seconds = _seconds_per_step(setting)
        own, other = (spread.mean if spread else 0.0 for spread in (seconds, _seconds_per_step(first)))
        lasts = sorted({run.last_step for run in setting.runs})
        hours = Spread(values=tuple(run.seconds / 3600 for run in setting.runs))
        is_timed = seconds is not None and setting is not first and other > 0
        return {
            "runs": str(len(setting.runs)),
            "steps": " to ".join(map(str, dict.fromkeys((lasts[0], lasts[-1])))),
            "before": setting.at_end(_ACCURACY, before=True),
            "after": setting.at_end(_ACCURACY),
            "greedy after": setting.at_end(_GREEDY),
            "difference": "" if setting is first else paired_difference(first, setting),
            "seconds a step": "" if seconds is None else Cell(mean=seconds.mean, error=seconds.error),
            "overhead %": Cell(mean=100 * (own / other - 1)) if is_timed else "",
            "hours": Cell(mean=hours.mean, error=hours.error),
        }

    def settings_table(self) -> list[list[str]]:
        """Returns what differs between the settings, and the names of their runs, with a head as the first row."""
        names = [", ".join(run.name for run in setting.runs) for setting in self.settings]
        head = ["setting", *(setting.label for setting in self.settings)]
        return [head, ["runs", *names], *([key, *_without_folders(values)] for key, values in self.differing.items())]

    def charts(self) -> list[Chart]:
        """Returns the charts for which any run has values, each with the curves of all settings."""
        drawn = [
            Chart(
                title=title,
                unit=unit,
                series=[one for setting in self.settings for one in _curves(setting, name)],
                note="mean over runs, band from the lowest to the highest run",
            )
            for title, unit, name in _CURVES
        ]
        return [chart for chart in drawn if chart.without_zeros() is not None]


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Groups runs by all settings in which they differ, apart from seeds, names, paths and loggers.

    Raises:
        DataError: a folder, its metrics or its configuration is missing, or no run was given.
    """
    if not folders:
        raise DataError("nothing to compare: give at least one run folder")
    runs = [load_run(Path(folder)) for folder in folders]
    for run in runs:
        if not run.rows:
            raise DataError(
                f"{run.folder}/metrics.jsonl has no rows yet; wait for the first step, or leave the run out"
            )
        if run.estimator == UNKNOWN_ESTIMATOR:
            raise DataError(f"{run.folder}/config.yaml does not set {_METHOD}; runs are grouped by their settings")
    configs = _configs(runs)
    differing = [key for key in sorted({*chain(*configs)}) if not _may_differ(key) and _differs(key, configs)]
    grouped: dict[tuple[str, ...], list[int]] = {}
    for number, config in enumerate(configs):
        grouped.setdefault(tuple(config.get(key, "not set") for key in differing), []).append(number)
    labels = _labels([runs[numbers[0]].estimator for numbers in grouped.values()], list(grouped), differing)
    settings = tuple(
        Setting(label=label, runs=tuple(runs[number] for number in numbers))
        for label, numbers in zip(labels, grouped.values(), strict=True)
    )
    table = {key: [values[place] for values in grouped] for place, key in enumerate(differing)}
    return Comparison(settings=settings, differing=table, notes=tuple(_notes(settings, table)))


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Writes a comparison as an HTML page and returns its path."""
    table = comparison.table()
    head = ["setting", *(column.name for column in table.columns)]
    rows = [[row.name, *(column.value(row) for column in table.columns)] for row in table.rows]
    settings_head, *settings = comparison.settings_table()
    return write_page(
        out,
        title=f"Comparison of {sum(len(setting.runs) for setting in comparison.settings)} runs",
        sections=[
            Section(title="Result", closed=False, tables=[Table(caption=table.title, head=head, rows=rows)]),
            Section(
                title="Runs and the settings in which they differ",
                closed=False,
                tables=[Table(head=settings_head, rows=settings)],
            ),
            Section(title="Notes", closed=False, notes=comparison.notes),
            Section(title="Curves", closed=False, charts=comparison.charts()),
        ],
    )


def plot_comparison(comparison: Comparison, out: Path) -> Path:
    """Draws the curves into one PNG, PDF or SVG file and returns its path."""
    return save_figure(comparison.charts(), out)


def paired_difference(first: Setting, second: Setting) -> Cell | str:
    """Returns the mean difference in accuracy, second minus first, in percentage points.

    Runs with equal seeds form pairs, which are compared at the last validation that both made. Empty if a pair has no
    common validation after the start of training. Without pairs, the result is the difference of the means at each
    run's end, with the error of two independent means.
    """
    partners = {_seeds(run): run for run in first.runs}
    pairs = [(partners[seed], run) for run in second.runs if (seed := _seeds(run)) in partners]
    if not pairs:
        before, after = first.at_end(_ACCURACY), second.at_end(_ACCURACY)
        if isinstance(before, str) or isinstance(after, str):
            return ""
        errors = (before.error, after.error)
        error = None if None in errors else math.hypot(*(error for error in errors if error is not None))
        return Cell(mean=after.mean - before.mean, error=error)
    differences: list[float] = []
    for one, other in pairs:
        values = one.values_by_step(_ACCURACY), other.values_by_step(_ACCURACY)
        common = [step for step in values[0].keys() & values[1].keys() if step > 0]
        if not common:
            return ""
        differences.append(100 * (values[1][max(common)] - values[0][max(common)]))
    spread = Spread(values=tuple(differences))
    return Cell(mean=spread.mean, error=spread.error)


def _curves(setting: Setting, name: str) -> Iterator[Series]:
    """Yields the mean of the runs over the steps that all of them measured; without such a curve, one curve per run."""
    measured = {run.name: run.values_by_step(name) for run in setting.runs}
    measured = {run: values for run, values in measured.items() if values}
    steps = sorted(set.intersection(*(set(values) for values in measured.values()))) if measured else []
    longest = max((len(values) for values in measured.values()), default=0)
    if len(steps) < min(2, longest):
        for run, values in measured.items():
            yield Series(
                label=f"{setting.label}: {run}", steps=sorted(values), values=[values[k] for k in sorted(values)]
            )
        return
    if steps:
        columns = [[values[step] for values in measured.values()] for step in steps]
        means = [statistics.fmean(column) for column in columns]
        band = (None, None) if len(measured) == 1 else ([*map(min, columns)], [*map(max, columns)])
        yield Series(label=setting.label, steps=steps, values=means, low=band[0], high=band[1])


def _seconds_per_step(setting: Setting) -> Spread | None:
    medians = [statistics.median(values) for run in setting.runs if (values := run.series("timing_s/step")[1])]
    return Spread(values=tuple(medians)) if medians else None


def _configs(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Returns the settings of each run as text, with defaults, and files by their content, however their path is spelt."""
    defaults = {
        each.key: as_yaml(each.default)
        for each in settings_of()
        if each.default is not REQUIRED and not _is_of_methods(each.key)
    }
    configs = [defaults | {key: as_yaml(value) for key, value in leaves(run.config)} for run in runs]
    spelt: dict[str, str] = {}
    for run, config in zip(runs, configs, strict=True):
        checksum = run.training_data()
        for key, value in config.items():
            path, colon, name = value.rpartition(":") if ":" in value else (value, "", "")
            longer = [other[key] for other in configs if other.get(key, "").endswith(f"/{value}")]
            if key == _DATA and checksum is not None:
                config[key] = spelt.setdefault(checksum, value)
            elif "/" in value and Path(path).is_file():
                with Path(path).open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                config[key] = spelt.setdefault(f"{key} {content}{colon}{name}", value)
            elif longer:  # a relative path, from a folder that this machine does not know
                config[key] = longer[0]
    return configs


def _differs(key: str, configs: Sequence[Mapping[str, str]]) -> bool:
    """Returns whether runs differ in a setting; one that some methods read, between their runs alone."""
    return len({config.get(key, "not set") for config in configs if key in config or not _is_of_methods(key)}) > 1


def _is_of_methods(key: str) -> bool:
    """Returns whether only some methods read a setting, so that the runs of others do not record it."""
    section, _, name = key.partition(".")
    return section == "algorithm" and ("." in name or name in SHARED)


def _without_folders(values: Sequence[str]) -> Sequence[str]:
    """Returns paths by their last two parts, if these tell them apart."""
    ends = ["/".join(Path(value).parts[-2:]) if "/" in value else value for value in values]
    return ends if len(set(ends)) == len(set(values)) else values


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
        "from the first row, paired by seed, at the last validation that both runs made; seconds are medians over steps."
    )
    for setting in settings:
        lasts = sorted({step for run in setting.runs if (step := setting.last_step(run)) is not None})
        if len(lasts) > 1:
            yield f"The runs of {setting.label} end at different steps: {', '.join(map(str, lasts))}."
        missing = [run.name for run in setting.runs if setting.last_step(run) is None]
        if missing:
            yield f"{setting.label}: {', '.join(missing)} made no validation, so there is no accuracy."
        elif lasts == [0]:
            yield f"{setting.label} has no validation after training."
        seeds = [_seeds(run) for run in setting.runs]
        if len(set(seeds)) < len(seeds):
            yield f"Some runs of {setting.label} have the same seeds: they are not independent."
        if setting is not settings[0] and not {_seeds(run) for run in settings[0].runs} & set(seeds):
            yield f"{setting.label} has no seed in common with {settings[0].label}: its difference is not paired."
    ends = {step for setting in settings for run in setting.runs if (step := setting.last_step(run)) is not None}
    if len(ends) > 1:
        yield "The last validations were made at different steps, so the accuracies after training are not all comparable."
    others = [key for key in differing if key != _METHOD and not key.startswith("algorithm.")]
    if others and len({setting.runs[0].estimator for setting in settings}) > 1:
        yield f"More than the method differs: {', '.join(others)}."


def _seeds(run: RunData) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in leaves(run.config) if _is_seed(key)))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _may_differ(key: str) -> bool:
    return _is_seed(key) or key.startswith(_MAY_DIFFER)
