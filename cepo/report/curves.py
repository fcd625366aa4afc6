"""Defines the charts of a run and the metrics that they show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cepo.report.charts import Chart, Series
from cepo.report.recorded_run import RunData
from cepo.tracking.console import STAGES

_SMOOTHED_STEPS = 5
_PARTS = {
    "Optimisation": (
        ("Policy loss", "loss", ("actor/pg_loss", "actor/distillation_loss")),
        ("Gradient norm", "norm before clipping", ("actor/grad_norm",)),
        ("Entropy", "nats per token", ("rollout/entropy", "actor/live_entropy")),
        ("KL", "nats per token", ("critic/kl", "actor/kl_loss", "actor/live_ppo_kl")),
        ("Ratio clip rate", "fraction of tokens", ("actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower")),
        ("Learning rate", "rate", ("actor/lr", "critic/lr")),
        ("Log-prob gap of engine and trainer", "nats", ("rollout/log_prob_gap_mean", "rollout/log_prob_gap_max")),
    ),
    "Evidence": (
        ("Evidence fractions", "fraction of tokens", ("evidence/positive_fraction", "evidence/negative_fraction")),
        ("Lambda", "mixing weight", ("evidence/lambda",)),
        (
            "Delta by sign of A",
            "nats per token",
            ("evidence/delta_mean_positive_advantage", "evidence/delta_mean_negative_advantage"),
        ),
        ("Weight clip rates", "fraction of tokens", ("evidence/clip_low_rate", "evidence/clip_high_rate")),
        ("Mean weight", "weight", ("evidence/weight_mean",)),
        ("Evidence against the advantage", "fraction of tokens", ("evidence/disagreement_rate",)),
        ("Divergence", "nats per token", ("distillation/divergence",)),
    ),
}
"""Charts of plain metrics: title, unit, names."""


def run_charts(run: RunData) -> dict[str, list[Chart]]:
    """Returns the charts of a run by heading, without empty charts."""
    groups = _plain(run, ("groups/mixed", "groups/all_right", "groups/all_wrong"))
    shown = [name for name in run.names("references/") if name.endswith("_used")]
    fallbacks = [name for name in run.names("references/") if name not in shown]
    evidence = [_delta_by_verdict(run), *_plain_charts(run, "Evidence")]
    parts = {
        "Learning": [_rewards(run), *_accuracy(run), _lengths(run), *_cut_responses(run)],
        "Evidence": evidence,
        "Groups and references": [
            Chart(title="Group composition", unit="fraction of groups", series=groups, stacked=True),
            Chart(title="References shown", unit="fraction of rows that learn", series=_plain(run, shown)),
            Chart(title="Fallbacks", unit="fraction", series=_plain(run, fallbacks)),
        ],
        "Leak probe": [_leak(run)],
        "Optimisation": _plain_charts(run, "Optimisation"),
        "Time and memory": [
            Chart(title="Seconds of each stage", unit="seconds", series=_stages(run, "timing_s"), stacked=True),
            Chart(title="Tokens of each stage", unit="tokens", series=_stages(run, "tokens"), stacked=True),
            Chart(title="Memory", unit="GiB", series=_plain(run, run.names("perf/"))),
        ],
    }
    kept = {heading: [chart for chart in charts if chart.series] for heading, charts in parts.items()}
    return {heading: charts for heading, charts in kept.items() if charts}


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Returns the mean over the last `width` values; over fewer at the start."""
    windows = (values[max(end - width, 0) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def binomial_error(fraction: float, count: float | None) -> float | None:
    """Returns the standard error of a fraction of n independent samples, `sqrt(p (1 - p) / n)`; None if n is unknown."""
    if not count or not math.isfinite(fraction):
        return None
    return math.sqrt(max(fraction * (1 - fraction), 0.0) / count)


def _plain_charts(run: RunData, heading: str) -> list[Chart]:
    return [Chart(title=title, unit=unit, series=_plain(run, names)) for title, unit, names in _PARTS[heading]]


def _plain(run: RunData, names: Sequence[str]) -> list[Series]:
    return [
        Series(label=name.partition("/")[2].replace("_", " "), steps=steps, values=values)
        for name in names
        for steps, values in [run.series(name)]
        if steps
    ]


def _banded(run: RunData, label: str, name: str, spread: str) -> list[Series]:
    steps, values = run.series(name)
    errors = run.values_by_step(spread)
    low = [value - errors.get(step, 0.0) for step, value in zip(steps, values, strict=True)]
    high = [value + errors.get(step, 0.0) for step, value in zip(steps, values, strict=True)]
    return [Series(label=label, steps=steps, values=values, low=low, high=high)] if steps else []


def _rewards(run: RunData) -> Chart:
    named = {"reward/mean", "reward/std", "reward/max", "reward/min", "reward/correct"}
    parts = [name for name in run.names("reward/") if name not in named and "num_" not in name]
    series = [*_banded(run, "mean", "reward/mean", "reward/std"), *_plain(run, parts)]
    return Chart(title="Reward", unit="reward", series=series, note="the band is one standard deviation over rollouts")


def _accuracy(run: RunData) -> list[Chart]:
    steps, values = run.series("reward/correct")
    sampled = f"training, temperature {run.temperature()}"
    training = [
        Series(label=f"{sampled}, each step", steps=steps, values=values),
        Series(label=f"mean of {_SMOOTHED_STEPS} steps", steps=steps, values=running_mean(values, _SMOOTHED_STEPS)),
    ]
    charts = [Chart(title="Training accuracy", unit="fraction right", series=training if steps else [])]
    held_out: list[Series] = []
    for name, label in (("accuracy", f"temperature {run.temperature(validation=True)}"), ("greedy_accuracy", "greedy")):
        steps, values = run.series(f"val/{name}")
        counts = run.values_by_step("val/num_samples" if name == "accuracy" else "val/num_greedy_samples")
        errors = [binomial_error(value, counts.get(step)) or 0.0 for step, value in zip(steps, values, strict=True)]
        low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
        held_out += [Series(label=label, steps=steps, values=values, low=low, high=high)] if steps else []
    note = "the band is one binomial standard error"
    return [*charts, Chart(title="Held-out accuracy", unit="fraction right", series=held_out, note=note)]


def _lengths(run: RunData) -> Chart:
    steps, values = run.series("response_length/mean")
    low, high = (run.series(f"response_length/{end}")[1] for end in ("min", "max"))
    series = [Series(label="mean", steps=steps, values=values, low=low, high=high)] if steps else []
    note = "the band reaches from the shortest to the longest"
    return Chart(title="Response length", unit="tokens", series=series, note=note)


def _cut_responses(run: RunData) -> list[Chart]:
    series = _plain(run, ["response_length/clip_ratio"])
    return [Chart(title="Responses cut by the length limit", unit="fraction", series=series)]


def _delta_by_verdict(run: RunData) -> Chart:
    series = [
        one
        for side in ("right", "wrong")
        for one in _banded(run, f"{side} rollouts", f"evidence/delta_mean_{side}", f"evidence/delta_std_{side}")
    ]
    note = "the band is one standard deviation over tokens"
    return Chart(title="Delta of right and wrong rollouts", unit="nats per token", series=series, note=note)


def _leak(run: RunData) -> Chart:
    names = ("leak/hint_gap_right", "leak/hint_gap_wrong")
    note = "how much the shown answer changes each token of held-out responses"
    return Chart(title="Gap between hinted and plain", unit="nats per token", series=_plain(run, names), note=note)


def _stages(run: RunData, kind: str) -> list[Series]:
    """Returns one bar per stage and training step; 0 if the step did not run the stage."""
    steps = [step for step, _ in zip(*run.series("timing_s/step"), strict=True) if step > 0]
    series: list[Series] = []
    for stage in STAGES:
        values = run.values_by_step(f"{kind}/{stage}")
        if any(values.get(step, 0.0) > 0 for step in steps):
            series.append(Series(label=stage, steps=steps, values=[values.get(step, 0.0) for step in steps]))
    return series
