"""Defines the charts of a run and the metrics that they show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cepo.report.charts import Chart, Series
from cepo.report.recorded_run import RunData
from cepo.tracking.console import STAGES

HELD_OUT = "Held-out accuracy"
_SMOOTHED_STEPS = 5
_WORDS = {
    "actor/pg_loss": ("policy loss", "mean over the optimizer steps"),
    "actor/distillation_loss": ("distillation loss", "mean over the optimizer steps"),
    "actor/grad_norm": ("gradient norm", "before clipping, mean over the optimizer steps"),
    "actor/live_entropy": ("of the trainer", "entropy over the tokens of rows that got an update pass"),
    "rollout/entropy": ("of the sampler", "mean of -log P over all sampled tokens, at temperature 1"),
    "critic/kl": ("in the reward", "distance from the reference model, as the reward's penalty"),
    "actor/kl_loss": ("in the loss", "distance from the reference model, as a term of the loss"),
    "actor/live_ppo_kl": ("old to new policy", "over the tokens of rows that got an update pass"),
    "actor/pg_clipfrac_higher": (
        "clipped from above",
        "share of tokens whose probability ratio exceeds its upper limit",
    ),
    "actor/pg_clipfrac_lower": (
        "clipped from below",
        "share of tokens whose probability ratio is below its lower limit",
    ),
    "actor/lr": ("policy", "learning rate of the policy"),
    "critic/lr": ("critic", "learning rate of the critic"),
    "rollout/log_prob_gap_mean": ("mean", "difference of a token's log-prob between sampler and trainer"),
    "rollout/log_prob_gap_max": ("largest", "difference of a token's log-prob between sampler and trainer"),
    "evidence/positive_fraction": (
        "for a right answer",
        "tokens likelier with a right answer in view than with a wrong one",
    ),
    "evidence/negative_fraction": (
        "for a wrong answer",
        "tokens likelier with a wrong answer in view than with a right one",
    ),
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


def _plain_charts(run: RunData, heading: str) -> list[Chart]:
    return [Chart(title=title, unit=unit, series=_plain(run, names)) for title, unit, names in _PARTS[heading]]


def _plain(run: RunData, names: Sequence[str]) -> list[Series]:
    return [
        Series(label=label, steps=steps, values=values, help=f"{meaning + '; ' if meaning else ''}{name}")
        for name in names
        for label, meaning in [_WORDS.get(name, (name.partition("/")[2].replace("_", " "), ""))]
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
        bounds = [wilson_interval(v, counts.get(step)) or (v, v) for step, v in zip(steps, values, strict=True)]
        low, high = ([bound[end] for bound in bounds] for end in (0, 1))
        held_out += [Series(label=label, steps=steps, values=values, low=low, high=high)] if steps else []
    note = "the band is one standard error (Wilson)"
    return [*charts, Chart(title=HELD_OUT, unit="fraction right", series=held_out, note=note)]


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
