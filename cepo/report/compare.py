"""Compares methods, with the runs of each method as repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cepo.errors import DataError
from cepo.report.charts import Chart, Series, save_figure
from cepo.report.recorded_run import UNKNOWN_ESTIMATOR, RunData, load_run

_METRIC = "val/accuracy"
_MAY_DIFFER = ("trainer.experiment_name", "trainer.project_name", "trainer.save_checkpoint_path", "trainer.logger")
_HEADINGS = ("method", "runs", "start", "best", "end", "rise in points", "each run at its end")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The values of one quantity over the runs of a method."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation (n - 1); None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean, `deviation / sqrt(n)`; None for a single run."""
        return None if self.deviation is None else self.deviation / math.sqrt(len(self.values))


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """The held-out accuracy of a method's runs at the steps that all of them measured.

    Attributes:
        steps: those steps.
        best_step: the step with the highest mean over runs, the earliest of equals.
        rise: end minus start of each run, as a fraction.
    """

    estimator: str
    runs: tuple[RunData, ...]
    steps: tuple[int, ...]
    start: Spread
    best_step: int
    best: Spread
    end: Spread
    rise: Spread


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of all methods in the order given, and remarks that a reader needs before trusting the numbers."""

    methods: tuple[MethodResult, ...]
    notes: tuple[str, ...]

    def table(self) -> Table:
        """Returns the comparison as a table for the terminal."""
        table = Table(
            title="held-out accuracy: mean ± sample standard deviation over runs (se: standard error of the mean)"
        )
        for heading in _HEADINGS:
            table.add_column(heading)
        for cells in self._rows():
            table.add_row(*(cell.replace(" (se", "\n(se") for cell in cells))
        table.caption = "\n".join(self.notes)
        table.caption_justify = "left"
        return table

    def markdown(self) -> str:
        """Returns the same table as Markdown."""
        lines = ["Held-out accuracy: mean ± sample standard deviation over runs (se: standard error of the mean).", ""]
        lines += ["| " + " | ".join(cells) + " |" for cells in (_HEADINGS, ("---",) * len(_HEADINGS), *self._rows())]
        lines += [""] + [f"- {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for method in self.methods:
            yield (
                method.estimator,
                str(len(method.runs)),
                f"{_shown(method.start)}, step {method.steps[0]}",
                f"{_shown(method.best)}, step {method.best_step}",
                f"{_shown(method.end)}, step {method.steps[-1]}",
                _shown(method.rise, scale=100, digits=1, sign="+"),
                ", ".join(f"{value:.3f}" for value in method.end.values),
            )


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Groups runs by `algorithm.adv_estimator` and summarises the held-out accuracy of each method over its runs.

    Raises:
        DataError: a folder, its metrics or its configuration is missing, no run was given, or the runs of a method have
            no validation step in common.
    """
    if not folders:
        raise DataError("nothing to compare: give at least one run folder")
    by_method: dict[str, list[RunData]] = {}
    for folder in folders:
        run = load_run(Path(folder))
        if not run.rows:
            raise DataError(f"{folder}/metrics.jsonl has no rows yet; wait for the first step, or leave the run out")
        if run.estimator == UNKNOWN_ESTIMATOR:
            raise DataError(f"{folder}/config.yaml does not set algorithm.adv_estimator; runs are grouped by it")
        by_method.setdefault(run.estimator, []).append(run)
    methods = tuple(_result(estimator, runs) for estimator, runs in by_method.items())
    return Comparison(methods=methods, notes=tuple(_notes(by_method, methods)))


def plot_comparison(comparison: Comparison, out: Path) -> Path:
    """Draws each method's mean curve with the band from its lowest to its highest run; returns the file's path."""
    series: list[Series] = []
    for method in comparison.methods:
        curves = [[run.values_by_step(_METRIC)[step] for step in method.steps] for run in method.runs]
        columns = list(zip(*curves, strict=True))
        label = f"{method.estimator} ({len(curves)} run{'s' if len(curves) > 1 else ''})"
        low, high = [*map(min, columns)], [*map(max, columns)]
        mean = [statistics.fmean(column) for column in columns]
        series.append(Series(label=label, steps=method.steps, values=mean, low=low, high=high))
    title = "Held-out accuracy: mean over runs, band from the lowest to the highest run"
    return save_figure([Chart(title=title, unit="fraction right", series=series)], out)


def _result(estimator: str, runs: Sequence[RunData]) -> MethodResult:
    measured = [run.values_by_step(_METRIC) for run in runs]
    steps = tuple(sorted(set.intersection(*(set(values) for values in measured))))
    if not steps:
        names = ", ".join(run.name for run in runs)
        raise DataError(
            f"the runs of {estimator} ({names}) share no step with {_METRIC}; use the same trainer.val_freq in all of them"
        )

    def at(step: int) -> Spread:
        return Spread(values=tuple(values[step] for values in measured))

    best_step = max(steps, key=lambda step: (at(step).mean, -step))
    start, end = at(steps[0]), at(steps[-1])
    rise = Spread(values=tuple(last - first for first, last in zip(start.values, end.values, strict=True)))
    return MethodResult(
        estimator=estimator,
        runs=tuple(runs),
        steps=steps,
        start=start,
        best_step=best_step,
        best=at(best_step),
        end=end,
        rise=rise,
    )


def _notes(by_method: Mapping[str, Sequence[RunData]], methods: Sequence[MethodResult]) -> Iterator[str]:
    yield "The best step is chosen on the problems it is measured on, so its accuracy is optimistic."
    if len({method.steps[-1] for method in methods}) > 1:
        yield "The methods' last common steps differ; their ends are not comparable."
    settings = {estimator: [dict(_leaves(run.config)) for run in runs] for estimator, runs in by_method.items()}
    for estimator, runs in settings.items():
        differing = [key for key in _keys(runs) if not _may_differ(key) and len(_values(runs, key)) > 1]
        if differing:
            yield f"The runs of {estimator} differ in {', '.join(differing)}: they are not repeats of one setting."
        seeds = [tuple(run[key] for key in sorted(run) if _is_seed(key)) for run in runs]
        if any(seeds) and len(set(seeds)) < len(seeds):
            yield f"Some runs of {estimator} have the same seeds: they are not independent."
    everything = [run for runs in settings.values() for run in runs]
    for key in _keys(everything):
        if not (key.startswith("algorithm.") or _may_differ(key)) and len(_values(everything, key)) > 1:
            shown = "; ".join(f"{estimator}: {', '.join(_values(runs, key))}" for estimator, runs in settings.items())
            yield f"{key} differs ({shown})."


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(tree)


def _keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({key for run in runs for key in run})


def _values(runs: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return sorted({str(run.get(key, "not set")) for run in runs})


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _may_differ(key: str) -> bool:
    return _is_seed(key) or key in _MAY_DIFFER


def _shown(spread: Spread, *, scale: float = 1.0, digits: int = 3, sign: str = "") -> str:
    text = f"{spread.mean * scale:{sign}.{digits}f}"
    if spread.deviation is None or spread.error is None:
        return text
    return f"{text} ± {spread.deviation * scale:.{digits}f} (se {spread.error * scale:.{digits}f})"
