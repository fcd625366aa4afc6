"""Defines the charts of a run and the metrics that they show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cepo.report.charts import Chart, Series
from cepo.report.recorded_run import RunData
from cepo.tracking.console import STAGES

LEARNING, HELD_OUT = "Learning", "Held-out accuracy"
COUNTS = {"val/accuracy": "val/num_samples", "val/greedy_accuracy": "val/num_greedy_samples"}
"""Of an accuracy, the metric with the number of its samples."""
_SPREADS = {"reward/mean": "reward/std"} | {
    f"evidence/delta_mean_{side}": f"evidence/delta_std_{side}" for side in ("right", "wrong")
}
_RANGES = {"response_length/mean": ("response_length/min", "response_length/max")}
_SHARE, _NATS, _DEVIATION = "fraction of tokens", "nats per token", "the band is one standard deviation"
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
        ("Hinted less plain", _NATS, "leak/.*", "how much the shown answer changes each token of held-out responses"),
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
_STACKED = ("Group composition", "Seconds of each stage", "Tokens of each stage")
_WORDS = {
    "val/accuracy": ("sampled", "at the temperature of validation"),
    "val/greedy_accuracy": ("greedy", "the likeliest token at each place"),
    "reward/correct": ("right", "share of the sampled responses"),
    "actor/pg_loss": ("policy loss", "mean over the optimizer steps"),
    "actor/distillation_loss": ("distillation loss", "mean over the optimizer steps"),
    "actor/grad_norm": ("gradient norm", "before clipping, mean over the optimizer steps"),
    "actor/live_entropy": ("of the trainer", "entropy over the tokens of rows that got an update pass"),
    "rollout/entropy": ("of the sampler", "mean of -log P over all sampled tokens, at temperature 1"),
    "critic/kl": ("in the reward", "distance from the reference model, as the reward's penalty"),
    "actor/kl_loss": ("in the loss", "distance from the reference model, as a term of the loss"),
    "actor/live_ppo_kl": ("old to new policy", "over the tokens of rows that got an update pass"),
    "actor/pg_clipfrac_higher": ("clipped from above", "tokens whose ratio of probabilities exceeds its upper limit"),
    "actor/pg_clipfrac_lower": ("clipped from below", "tokens whose ratio of probabilities is below its lower limit"),
    "actor/lr": ("policy", "learning rate of the policy"),
    "critic/lr": ("critic", "learning rate of the critic"),
    "rollout/log_prob_gap_mean": ("mean", "difference of a token's log-prob between sampler and trainer"),
    "rollout/log_prob_gap_max": ("largest", "difference of a token's log-prob between sampler and trainer"),
    "evidence/delta_mean_right": ("right rollouts", "mean of delta, the evidence of a token"),
    "evidence/delta_mean_wrong": ("wrong rollouts", "mean of delta, the evidence of a token"),
    "evidence/positive_fraction": ("for a right answer", "tokens likelier with a right answer in view than a wrong"),
    "evidence/negative_fraction": ("for a wrong answer", "tokens likelier with a wrong answer in view than a right"),
    "evidence/lambda": ("lambda", "share of the evidence's weights in the advantages"),
    "evidence/delta_mean_positive_advantage": ("A > 0", "mean of delta, the evidence of a token"),
    "evidence/delta_mean_negative_advantage": ("A < 0", "mean of delta, the evidence of a token"),
    "evidence/clip_low_rate": ("clipped from below", "tokens whose weight is at its lower limit"),
    "evidence/clip_high_rate": ("clipped from above", "tokens whose weight is at its upper limit"),
    "evidence/weight_mean": ("weight", "mean over tokens; 1 is the plain method"),
    "evidence/disagreement_rate": ("against", "tokens whose evidence has the other sign than their advantage"),
    "groups/mixed": ("mixed", "groups with right and wrong responses, from which a group method learns"),
    "leak/hint_gap_right": ("right responses", "log-prob with the answer in the context minus without it"),
    "leak/hint_gap_wrong": ("wrong responses", "log-prob with the answer in the context minus without it"),
    "response_length/clip_ratio": ("cut", "responses that reached the length limit"),
    "perf/cpu_memory_used_gb": ("main memory", "of the trainer's process"),
}
"""Of some metrics a label, in words, and the definition."""


def run_charts(run: RunData) -> dict[str, list[Chart]]:
    """Returns the charts of a run by heading, without empty charts."""
    parts: dict[str, list[Chart]] = {}
    for heading, chart, names in planned_charts(run.names()):
        series = [_stage(run, name) if chart.stacked else series_of(run, name) for name in names]
        parts.setdefault(heading, []).append(replace(chart, series=series))
    return parts


def planned_charts(known: Sequence[str]) -> Iterator[tuple[str, Chart, list[str]]]:
    """Yields the charts that can be drawn from the known metrics: heading, chart without series, names of metrics."""
    for heading, charts in CHARTS.items():
        for title, unit, patterns, note in charts:
            names = [name for pattern in patterns.split() for name in known if re.fullmatch(pattern, name)]
            if names:
                yield heading, Chart(title=title, unit=unit, series=(), note=note, stacked=title in _STACKED), names


def series_of(run: RunData, name: str) -> Series:
    """Returns a metric's curve, with its band if it has one."""
    steps, values = run.series(name)
    counts, spread = run.values_by_step(COUNTS.get(name, "")), run.values_by_step(_SPREADS.get(name, ""))
    low = high = None
    if name in COUNTS and steps:
        bounds = [wilson_interval(v, counts.get(step)) or (v, v) for step, v in zip(steps, values, strict=True)]
        low, high = zip(*bounds, strict=True)
    elif name in _SPREADS:
        low, high = (
            [v + sign * spread.get(step, 0.0) for step, v in zip(steps, values, strict=True)] for sign in (-1, 1)
        )
    elif name in _RANGES:
        low, high = (run.series(end)[1] for end in _RANGES[name])
    label, help_text = words(name)
    return Series(label=label, help=help_text, steps=steps, values=values, low=low, high=high)


def words(name: str) -> tuple[str, str]:
    """Returns a metric's label and its definition, which ends with its name."""
    label, meaning = _WORDS.get(name, (name.partition("/")[2].replace("_", " "), ""))
    return label, f"{meaning + '; ' if meaning else ''}{name}"


def _stage(run: RunData, name: str) -> Series:
    """Returns a value for each training step; 0 where the step did not measure it."""
    values = run.values_by_step(name)
    steps = [step for step in run.series("timing_s/step")[0] or values if step > 0]
    return Series(label=words(name)[0], steps=steps, values=[values.get(step, 0.0) for step in steps], help=name)


def wilson_interval(fraction: float, count: float | None, z: float = 1.0) -> tuple[float, float] | None:
    """Returns Wilson's interval of a fraction p of n independent samples; None if n is unknown.

    `(p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)`: z is 1 for one standard error and 1.96 for
    95 %. It has a width at p = 0 and p = 1 too, and stays between 0 and 1.
    """
    if count is None or not count > 0 or not math.isfinite(fraction):
        return None
    square = z * z / count
    half = math.sqrt(square * max(fraction * (1 - fraction), 0.0) + square * square / 4)
    return (fraction + square / 2 - half) / (1 + square), (fraction + square / 2 + half) / (1 + square)
