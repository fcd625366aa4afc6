"""Draws the training curves of one run: accuracy, evidence, seconds per stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cepo.report.recorded_run import RunData
from cepo.tracking.console import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct under every common colour blindness, and grey for a ninth stage.
BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, BLACK, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#000000",
    "#999999",
)
STAGE_COLOURS = dict(zip(STAGES, (BLUE, YELLOW, GREEN, VERMILLION, BLACK, ORANGE, SKY, GREY, PURPLE), strict=True))
_SMOOTHED_STEPS = 5


def draw_accuracy(axes: Axes, run: RunData) -> None:
    """Draws each step's training accuracy with its running mean, and validation points with one binomial standard error."""
    steps, accuracy = run.series("reward/accuracy")
    if steps:
        axes.plot(steps, accuracy, color=SKY, linewidth=1, alpha=0.8, label="training, each step")
    if len(steps) >= _SMOOTHED_STEPS:
        smoothed = running_mean(accuracy, _SMOOTHED_STEPS)
        axes.plot(steps, smoothed, color=BLUE, linewidth=2, label=f"training, mean of {_SMOOTHED_STEPS} steps")
    steps, accuracy = run.series("val/accuracy")
    if steps:
        counts = run.values_by_step("val/num_samples")
        errors = [binomial_error(value, counts.get(step)) or 0.0 for step, value in zip(steps, accuracy, strict=True)]
        style = {"fmt": "o-", "color": VERMILLION, "markersize": 5, "capsize": 3, "linewidth": 1.2}
        axes.errorbar(steps, accuracy, yerr=errors, label="held-out, ± standard error", **style)
    _finish(axes, "Accuracy", "fraction right")


def draw_evidence(axes: Axes, run: RunData) -> None:
    """Draws fractions of tokens with evidence, and lambda; for a run without evidence, the fractions of groups instead."""
    curves = [
        ("evidence/positive_fraction", "tokens with positive evidence", BLUE, "-"),
        ("evidence/negative_fraction", "tokens with negative evidence", VERMILLION, "--"),
        ("evidence/lambda", "lambda", BLACK, ":"),
    ]
    title = "Evidence"
    if not any(run.series(name)[0] for name, *_ in curves[:2]):
        title = "Groups (this run used no evidence)"
        curves = [
            ("groups/mixed", "mixed", BLUE, "-"),
            ("groups/all_right", "all right", GREEN, "--"),
            ("groups/all_wrong", "all wrong", VERMILLION, ":"),
        ]
    for name, label, colour, line in curves:
        steps, values = run.series(name)
        if steps:
            axes.plot(steps, values, line, color=colour, linewidth=1.8, label=label)
    _finish(axes, title, "fraction")


def draw_leak(axes: Axes, run: RunData) -> None:
    """Draws the leak probe: how much showing the right answer changes each token of held-out responses, in nats."""
    for name, label, colour, line in (
        ("leak/hint_gap_right", "right responses", BLUE, "o-"),
        ("leak/hint_gap_wrong", "wrong responses", VERMILLION, "s--"),
    ):
        steps, values = run.series(name)
        if steps:
            axes.plot(steps, values, line, color=colour, linewidth=1.5, markersize=4, label=label)
    axes.axhline(0.0, color=BLACK, linewidth=0.7)
    limits = axes.get_ylim()
    _finish(axes, "Gap between hinted and plain", "nats per token", fraction=False)
    axes.set_ylim(*limits)


def draw_seconds(axes: Axes, run: RunData) -> None:
    """Draws seconds per stage as a stacked bar for each training step; `other` is what the stages do not cover."""
    steps, totals = run.series("timing_s/step")
    if not steps:
        steps = sorted({step for stage in STAGES for step in run.series(f"timing_s/{stage}")[0] if step > 0})
        totals = []
    heights = [0.0] * len(steps)
    for stage in STAGES:
        by_step = run.values_by_step(f"timing_s/{stage}")
        if not any(by_step.get(step, 0.0) > 0 for step in steps):
            continue
        values = [by_step.get(step, 0.0) for step in steps]
        axes.bar(steps, values, bottom=heights, width=1.0, color=STAGE_COLOURS[stage], label=stage, linewidth=0)
        heights = [height + value for height, value in zip(heights, values, strict=True)]
    rest = [max(total - height, 0.0) for total, height in zip(totals, heights, strict=False)]
    if rest and sum(rest) > 0.01 * sum(totals):
        axes.bar(steps, rest, bottom=heights, width=1.0, color="#DDDDDD", label="other", linewidth=0)
    _finish(axes, "Time of each step", "seconds", fraction=False)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Returns the mean over the last `width` values; over fewer at the start."""
    windows = (values[max(end - width, 0) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def binomial_error(fraction: float, count: float | None) -> float | None:
    """Returns the standard error of a fraction of n independent samples, `sqrt(p (1 - p) / n)`; None if n is unknown."""
    if not count or not math.isfinite(fraction):
        return None
    return math.sqrt(max(fraction * (1 - fraction), 0.0) / count)


def _finish(axes: Axes, title: str, unit: str, *, fraction: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if fraction:
        axes.set_ylim(0, 1)
    else:
        axes.set_ylim(0, 1.35 * max(axes.get_ylim()[1], 1e-9))  # room for the legend above the bars
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, ncols=1 if fraction else 3, loc="best")
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#777777")
