"""Says which charts a run has: their titles, units and metrics, the bands of their curves, and what metrics mean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cepo.metrics import wilson_interval
from cepo.report.drawing import Chart, Series
from cepo.report.html_page import Section
from cepo.report.recorded_run import COUNTS
from cepo.run_folder.layout import STAGES

Curves = Mapping[str, Mapping[int, float]]
"""Metrics by name and step."""
LEARNING = "Learning"
LENGTH = "Response length"
HELD_OUT = "Held-out accuracy"
_SHARE = "fraction of tokens"
_NATS = "nats per token"
_STAGES_BETWEEN_STEPS = ("validate", "save")
_STAGES_OF_A_STEP = [stage for stage in STAGES if stage not in _STAGES_BETWEEN_STEPS]
_DEVIATION = "the band is one standard deviation"
_ACCURACIES = "val/accuracy val/greedy_accuracy val/blind_accuracy"
_REWARDS = "reward/mean reward/(?!(mean|std|max|min|correct|num_raised|num_timed_out)$).*"
CHARTS = {
    LEARNING: (
        (HELD_OUT, "fraction right", _ACCURACIES, "the band is one standard error (Wilson)"),
        ("Headroom of sampling", "fraction of problems", "val/headroom", ""),
        ("Reward", "per response", _REWARDS, _DEVIATION),
        ("Training accuracy", "fraction right", "reward/correct", ""),
        (LENGTH, "tokens", "response_length/mean", "the band reaches from the shortest to the longest"),
        ("Responses cut by the length limit", "fraction", "response_length/clip_ratio", ""),
    ),
    "Evidence": (
        ("Delta", _NATS, "evidence/delta_mean_(right|wrong)", f"{_DEVIATION} over tokens"),
        ("Evidence fractions", _SHARE, "evidence/(positive|negative)_fraction", ""),
        ("Lambda", "mixing weight", "evidence/lambda", ""),
        ("Delta by sign of A", _NATS, "evidence/delta_mean_.*_advantage", ""),
        ("Weight clip rates", _SHARE, "evidence/clip_.*_rate", ""),
        ("Mean weight", "weight", "evidence/weight_mean", ""),
        ("Open gates", _SHARE, "evidence/open_fraction", ""),
        ("Noise of the contrast", _NATS, "evidence/noise", ""),
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
        ("Seconds of each stage", "seconds", " ".join(f"timing_s/{stage}" for stage in _STAGES_OF_A_STEP), ""),
        ("Seconds between steps", "seconds", " ".join(f"timing_s/{stage}" for stage in _STAGES_BETWEEN_STEPS), ""),
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
    "val/blind_accuracy": ("blind", "sampled, with black images"),
    "val/headroom": ("headroom", "problems that some sample solves, less those that the greedy response solves"),
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
    "evidence/open_fraction": ("open", "tokens that keep their whole advantage"),
    "evidence/noise": ("noise", "standard deviation of delta, by tokens at which it contradicts the outcome"),
    "evidence/disagreement_rate": ("against", "tokens whose evidence has the other sign than their advantage"),
    "groups/mixed": ("mixed", "groups with right and wrong responses, from which a group method learns"),
    "leak/hint_gap_(right|wrong)": ("{} responses", _GAP),
    "response_length/clip_ratio": ("cut", "responses that reached the length limit"),
    "perf/cpu_memory_used_gb": ("main memory", "of the trainer's process"),
}
"""By expressions for the names of metrics a label, in which {} is the first group, and the definition."""


def planned_charts(known: Sequence[str]) -> Iterator[tuple[Chart, list[str]]]:
    """Yields the charts that can be drawn from the known metrics, without series, each with the names of its metrics."""
    for heading, charts in CHARTS.items():
        for title, unit, patterns, note in charts:
            names: list[str] = []
            for pattern in patterns.split():
                names += [name for name in known if re.fullmatch(pattern, name)]
            if names:
                yield Chart(title=title, unit=unit, series=(), note=note, heading=heading), names


def charts_of(curves: Curves) -> list[Chart]:
    """Returns the charts that can be drawn from a run's metrics."""
    charts: list[Chart] = []
    for chart, names in planned_charts(sorted(curves)):
        charts.append(replace(chart, series=[series_of(curves, name) for name in names]))
    return charts


def chart_sections(charts: Sequence[Chart], *, first: Chart | None = None) -> Iterator[Section]:
    """Yields the parts of a page with charts, the part on learning open.

    Nothing is drawn twice: curves that are equal to others of their chart share a label, and a chart whose curves have all
    been drawn, in `first` or above, is named only. So are curves that are always 0.
    """
    drawn_curves: set[_Curve] = set()
    if first is not None:
        drawn_curves.update(_curve_of(series) for series in first.series)
    for heading, charts_of_heading in itertools.groupby(charts, key=lambda chart: chart.heading):
        drawn_charts: list[Chart] = []
        zero_curves: list[str] = []
        repeated_charts: list[str] = []
        for chart in charts_of_heading:
            curves = [series for series in chart.series if any(series.values)]
            zero_curves += [f"{chart.title}: {series.label}" for series in chart.series if not any(series.values)]
            if not curves:
                continue
            if all(_varies(series) and _curve_of(series) in drawn_curves for series in curves):
                repeated_charts.append(chart.title)
                continue
            drawn_curves.update(_curve_of(series) for series in curves)
            drawn_charts.append(replace(chart, series=_joined(curves)))
        notes: list[str] = []
        if zero_curves:
            notes.append(f"Always 0, and not drawn: {'; '.join(zero_curves)}.")
        if repeated_charts:
            notes.append(f"Equal to curves above, and not drawn: {'; '.join(repeated_charts)}.")
        yield Section(title=heading, charts=drawn_charts, notes=notes, closed=heading != LEARNING)


_Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""The steps and the values of a curve."""


def _curve_of(series: Series) -> _Curve:
    return tuple(series.steps), tuple(series.values)


def _varies(series: Series) -> bool:
    """Returns whether a curve has enough different values to be recognised; two constants may be equal by chance."""
    return len(set(series.values)) > 2


def _joined(curves: Sequence[Series]) -> list[Series]:
    """Returns the curves of a chart without repetitions; equal ones have both labels, and the first one's band."""
    joined: dict[_Curve, Series] = {}
    for series in curves:
        curve = _curve_of(series)
        if curve in joined:
            earlier = joined[curve]
            labels = f"{earlier.label} = {series.label}"
            joined[curve] = replace(earlier, label=labels, help=f"{earlier.help}; {series.help}")
        else:
            joined[curve] = series
    return list(joined.values())


def series_of(curves: Curves, name: str) -> Series:
    """Returns a metric's curve, with its band if it has one: Wilson's, one standard deviation, or the range."""
    values = curves[name]
    low, high = _band(curves, name)
    label, meaning = words(name)
    return Series(label=label, help=meaning, steps=list(values), values=list(values.values()), low=low, high=high)


def _band(curves: Curves, name: str) -> tuple[list[float], list[float]]:
    """Returns the lower and upper ends of a metric's band, one per measured step; empty if it has none."""
    values = curves[name]
    deviations = curves.get(name.replace("mean", "std"), {}) if "mean" in name else {}
    low: list[float] = []
    high: list[float] = []
    if name in COUNTS:
        counts = curves.get(COUNTS[name], {})
        for step, accuracy in values.items():
            interval = wilson_interval(accuracy, counts.get(step)) or (accuracy, accuracy)
            low.append(interval[0])
            high.append(interval[1])
    elif deviations:
        low = [value - deviations.get(step, 0.0) for step, value in values.items()]
        high = [value + deviations.get(step, 0.0) for step, value in values.items()]
    elif name == "response_length/mean":
        shortest = curves.get("response_length/min", {})
        longest = curves.get("response_length/max", {})
        low = [shortest.get(step, value) for step, value in values.items()]
        high = [longest.get(step, value) for step, value in values.items()]
    return low, high


def words(name: str) -> tuple[str, str]:
    """Returns a metric's label and its definition, which ends with its name."""
    for pattern, (label, meaning) in _WORDS.items():
        match = re.fullmatch(pattern, name)
        if match:
            return label.format(*match.groups()), f"{meaning}; {name}"
    _, _, name_in_group = name.partition("/")
    return name_in_group.replace("_", " "), name
