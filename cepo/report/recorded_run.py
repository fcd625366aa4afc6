"""Opens the folder of a finished or running run as values: settings, metrics and their curves, rollouts, samples, checkpoints."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cepo.config.listing import written
from cepo.config.record import without_interpolation
from cepo.config.sources import read_file
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Tree
from cepo.metrics import wilson_interval
from cepo.report.drawing import Chart, Section, Series
from cepo.report.score_tables import Cell
from cepo.run_folder.layout import CONFIG_FILE, STAGES, checkpoint_folders
from cepo.run_folder.records import MetricsRow, read_generations, read_metrics

if TYPE_CHECKING:
    import pandas

UNKNOWN_ESTIMATOR = "unknown method"
COUNTS = {"val/accuracy": "val/num_samples", "val/greedy_accuracy": "val/num_greedy_samples"}
"""Of an accuracy, the metric with the number of its samples."""
LEARNING = "Learning"
HELD_OUT = "Held-out accuracy"
_SHARE = "fraction of tokens"
_NATS = "nats per token"
_DEVIATION = "the band is one standard deviation"
CHARTS = {
    LEARNING: (
        (HELD_OUT, "fraction right", "val/accuracy val/greedy_accuracy", "the band is one standard error (Wilson)"),
        ("Reward", "per response", r"reward/mean reward/(?!mean|std|max|min|correct|.*num_).*", _DEVIATION),
        ("Training accuracy", "fraction right", "reward/correct", ""),
        ("Response length", "tokens", "response_length/mean", "the band reaches from the shortest to the longest"),
        ("Responses cut by the length limit", "fraction", "response_length/clip_ratio", ""),
    ),
    "Evidence": (
        ("Delta", _NATS, "evidence/delta_mean_(right|wrong)", f"{_DEVIATION} over tokens"),
        ("Evidence fractions", _SHARE, "evidence/(positive|negative)_fraction", ""),
        ("Lambda", "mixing weight", "evidence/lambda", ""),
        ("Delta by sign of A", _NATS, "evidence/delta_mean_.*_advantage", ""),
        ("Weight clip rates", _SHARE, "evidence/clip_.*_rate", ""),
        ("Mean weight", "weight", "evidence/weight_mean", ""),
        ("Evidence against the advantage", _SHARE, "evidence/disagreement_rate", ""),
        ("Divergence", _NATS, "distillation/divergence", ""),
    ),
    "Groups and references": (
        ("Group composition", "fraction of groups", "groups/(mixed|all_right|all_wrong)", ""),
        ("References shown", "fraction of rows that learn", "references/.*_used", ""),
        ("Fallbacks", "fraction", "references/.*(?<!_used)", ""),
    ),
    "Leak probe": (
        ("Log-prob gained from seeing the answer", _NATS, "leak/hint_gap_.*", "held-out responses"),
        ("The same, of whole responses", "nats per response", "leak/log_likelihood_gap", "held-out responses"),
        ("Responses that mention an answer nobody gave", "fraction", "leak/mention_fraction", "held-out responses"),
    ),
    "Optimisation": (
        ("Policy loss", "loss", "actor/pg_loss actor/distillation_loss", ""),
        ("Gradient norm", "norm before clipping", "actor/grad_norm", ""),
        ("Entropy", _NATS, "rollout/entropy actor/live_entropy", ""),
        ("KL", _NATS, "critic/kl actor/kl_loss actor/live_ppo_kl", ""),
        ("Ratio clip rate", _SHARE, "actor/pg_clipfrac_.*", ""),
        ("Learning rate", "rate", "(actor|critic)/lr", ""),
        ("Log-prob gap of engine and trainer", "nats", "rollout/log_prob_gap_.*", ""),
    ),
    "Time and memory": (
        ("Seconds of each stage", "seconds", " ".join(f"timing_s/{stage}" for stage in STAGES), ""),
        ("Tokens of each stage", "tokens", " ".join(f"tokens/{stage}" for stage in STAGES), ""),
        ("Seconds of a step", "seconds", "timing_s/step", ""),
        ("Memory", "GiB", "perf/.*", ""),
    ),
}
"""By heading: title, unit, expressions for the names of the metrics, and a note on the band."""
_GAP = "log-prob with the answer in the context minus without it"
_DELTA = "mean of delta, the evidence of a token"
_KL = "distance from the reference model, as"
_WORDS = {
    "val/accuracy": ("sampled", "at the temperature of validation"),
    "val/greedy_accuracy": ("greedy", "the likeliest token at each place"),
    "reward/correct": ("right", "share of the sampled responses"),
    "actor/pg_loss": ("policy loss", "mean over the optimizer steps"),
    "actor/distillation_loss": ("distillation loss", "mean over the optimizer steps"),
    "actor/grad_norm": ("gradient norm", "before clipping, mean over the optimizer steps"),
    "actor/live_entropy": ("of the trainer", "entropy over the tokens of rows that got an update pass"),
    "rollout/entropy": ("of the sampler", "mean of -log P over all sampled tokens, at temperature 1"),
    "critic/kl": ("in the reward", f"{_KL} the reward's penalty"),
    "actor/kl_loss": ("in the loss", f"{_KL} a term of the loss"),
    "actor/live_ppo_kl": ("old to new policy", "over the tokens of rows that got an update pass"),
    "actor/pg_clipfrac_(higher|lower)": ("beyond the {} limit", "tokens whose ratio of probabilities is clipped there"),
    "(actor|critic)/lr": ("{}", "learning rate"),
    "rollout/log_prob_gap_(.*)": ("{}", "difference of a token's log-prob between sampler and trainer"),
    "evidence/delta_mean_(right|wrong)": ("{} rollouts", _DELTA),
    "evidence/delta_mean_(positive|negative)_advantage": ("{} advantage", _DELTA),
    "evidence/positive_fraction": ("for a right answer", "tokens likelier with a right answer in view than a wrong"),
    "evidence/negative_fraction": ("for a wrong answer", "tokens likelier with a wrong answer in view than a right"),
    "evidence/lambda": ("lambda", "share of the evidence's weights in the advantages"),
    "evidence/clip_(low|high)_rate": ("at the {} limit", "tokens whose weight is clipped there"),
    "evidence/weight_mean": ("weight", "mean over tokens; 1 is the plain method"),
    "evidence/disagreement_rate": ("against", "tokens whose evidence has the other sign than their advantage"),
    "groups/mixed": ("mixed", "groups with right and wrong responses, from which a group method learns"),
    "leak/hint_gap_(right|wrong)": ("{} responses", _GAP),
    "response_length/clip_ratio": ("cut", "responses that reached the length limit"),
    "perf/cpu_memory_used_gb": ("main memory", "of the trainer's process"),
}
"""By expressions for the names of metrics a label, in which {} is the first group, and the definition."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of a run, as they were when it was opened.

    Attributes:
        folder: the run folder, `trainer.save_checkpoint_path`.
        rows: the recorded metrics.
        config: the resolved settings as nested mappings; empty if the run wrote none.
    """

    folder: Path
    rows: Sequence[MetricsRow]
    config: Mapping[str, object]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def estimator(self) -> str:
        """The value of `algorithm.adv_estimator`."""
        return str(self.setting("algorithm.adv_estimator", UNKNOWN_ESTIMATOR))

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return self.rows[-1].step if self.rows else 0

    @property
    def seconds(self) -> float:
        """The seconds of all steps, validations and checkpoints."""
        durations: list[float] = []
        for name in ("step", "validate", "save"):
            _, values = self.series(f"timing_s/{name}")
            durations += values
        return math.fsum(durations)

    @property
    def temperature(self) -> float:
        """The sampling temperature of validation."""
        sampled = self.setting("worker.rollout.temperature", 1.0)
        return self.setting("worker.rollout.val_override_config.temperature", sampled)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the complete checkpoints by step, oldest first."""
        return checkpoint_folders(self.folder)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row per step (the index; 0 is before training), one column per metric, NaN where unmeasured."""
        import pandas

        steps = pandas.Index([row.step for row in self.rows], name="step", dtype="int64")
        return pandas.DataFrame([dict(row.values) for row in self.rows], index=steps, dtype="float64")

    @cached_property
    def rollouts(self) -> pandas.DataFrame:
        """The recorded rollouts, one row each, with the columns of the trace (`docs/tracking.md`); raises `DataError`."""
        from cepo.run_folder.trace import read_rollout_table

        return read_rollout_table(self.folder).to_pandas()

    @cached_property
    def validation_samples(self) -> pandas.DataFrame:
        """The recorded validation responses, one row each, with the step after which they were sampled."""
        import pandas

        return pandas.DataFrame(list(read_generations(self.folder)))

    def setting(self, key: str, default: object = None) -> Any:
        """Returns the value of a dotted key of the configuration, or the default if it is missing or None."""
        node: object = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    def names(self) -> list[str]:
        """Returns the sorted names of the recorded metrics."""
        names: set[str] = set()
        for row in self.rows:
            names.update(row.values)
        return sorted(names)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was measured, and its values."""
        measured = self.values_by_step(name)
        return list(measured), list(measured.values())

    def values_by_step(self, name: str) -> dict[int, float]:
        return {row.step: row.values[name] for row in self.rows if name in row.values}

    def accuracies(self, name: str) -> dict[int, Cell]:
        """Returns by step one of the accuracies of `COUNTS`, with Wilson's intervals."""
        counts = self.values_by_step(COUNTS[name])
        cells: dict[int, Cell] = {}
        for step, accuracy in self.values_by_step(name).items():
            cells[step] = Cell.of_fraction(accuracy, counts.get(step))
        return cells


def load_run(folder: Path) -> RunData:
    """Opens a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    rows = read_metrics(folder)
    config: Tree = {}
    path = folder / CONFIG_FILE
    if path.exists():
        try:
            source, _ = read_file(path, within=folder)
        except ConfigError as error:
            raise DataError(str(error)) from error
        config = {str(key): value for key, value in without_interpolation(source.tree).items()}
    return RunData(folder=folder, rows=rows, config=config)


def as_yaml(value: object) -> str:
    """Returns a value of the configuration as YAML in one line."""
    if not isinstance(value, list | Mapping):
        return written(value)
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).strip()


def planned_charts(known: Sequence[str]) -> Iterator[tuple[Chart, list[str]]]:
    """Yields the charts that can be drawn from the known metrics, without series, each with the names of its metrics."""
    for heading, charts in CHARTS.items():
        for title, unit, patterns, note in charts:
            names: list[str] = []
            for pattern in patterns.split():
                names += [name for name in known if re.fullmatch(pattern, name)]
            if names:
                yield Chart(title=title, unit=unit, series=(), note=note, heading=heading), names


def run_charts(run: RunData) -> list[Chart]:
    """Returns the charts of the metrics that a run has."""
    charts: list[Chart] = []
    for chart, names in planned_charts(run.names()):
        curves = [series_of(run, name) for name in names]
        charts.append(replace(chart, series=curves))
    return charts


def chart_sections(charts: Sequence[Chart]) -> Iterator[Section]:
    """Yields the parts of a page with charts, the first one open; series that are always 0 are named only."""
    for heading, charts_of_heading in itertools.groupby(charts, key=lambda chart: chart.heading):
        drawn_charts: list[Chart] = []
        zero_curves: list[str] = []
        for chart in charts_of_heading:
            curves = [curve for curve in chart.series if any(curve.values)]
            zero_curves += [f"{chart.title}: {curve.label}" for curve in chart.series if not any(curve.values)]
            if curves:
                drawn_charts.append(replace(chart, series=curves))
        notes: list[str] = []
        if zero_curves:
            notes.append(f"Always 0, and not drawn: {'; '.join(zero_curves)}.")
        yield Section(title=heading, charts=drawn_charts, notes=notes, closed=heading != LEARNING)


def series_of(run: RunData, name: str) -> Series:
    """Returns a metric's curve, with its band if it has one: Wilson's, one standard deviation, or the range."""
    steps, values = run.series(name)
    low, high = _band(run, name)
    label, meaning = words(name)
    return Series(label=label, help=meaning, steps=steps, values=values, low=low, high=high)


def _band(run: RunData, name: str) -> tuple[list[float], list[float]]:
    """Returns the lower and upper ends of a metric's band, one per measured step; empty if it has none."""
    values = run.values_by_step(name)
    deviations: dict[int, float] = {}
    if "mean" in name:
        deviations = run.values_by_step(name.replace("mean", "std"))
    low: list[float] = []
    high: list[float] = []
    if name in COUNTS:
        counts = run.values_by_step(COUNTS[name])
        for step, accuracy in values.items():
            interval = wilson_interval(accuracy, counts.get(step)) or (accuracy, accuracy)
            low.append(interval[0])
            high.append(interval[1])
    elif deviations:
        low = [value - deviations.get(step, 0.0) for step, value in values.items()]
        high = [value + deviations.get(step, 0.0) for step, value in values.items()]
    elif name == "response_length/mean":
        _, low = run.series("response_length/min")
        _, high = run.series("response_length/max")
    return low, high


def words(name: str) -> tuple[str, str]:
    """Returns a metric's label and its definition, which ends with its name."""
    for pattern, (label, meaning) in _WORDS.items():
        match = re.fullmatch(pattern, name)
        if match:
            return label.format(*match.groups()), f"{meaning}; {name}"
    _, _, name_in_group = name.partition("/")
    return name_in_group.replace("_", " "), name
