"""Charts over steps: those of a run, as data for pages, whose script draws them, and drawn with matplotlib for papers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cepo.metrics import wilson_interval
from cepo.report.recorded_run import COUNTS, RunData
from cepo.tracking.run_folder import STAGES, finite_or_none
from cepo.trees import Tree

# Okabe and Ito's colours, which people with common forms of colour blindness can distinguish, with grey for black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777", "#A0522D", "#F0E442")
DASHES = ((), (6, 4), (2, 3), (6, 3, 2, 3))
_MARKED_POINTS = 60
_PANEL_INCHES, _MOST_COLUMNS = (4.4, 3.2), 3
LEARNING, HELD_OUT = "Learning", "Held-out accuracy"
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
_GAP, _DELTA = "log-prob with the answer in the context minus without it", "mean of delta, the evidence of a token"
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
class Series:
    """One curve: a value per measured step, with an optional band from `low` to `high`. `help` defines the quantity."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over steps, or over `x`, with one unit. `heading` is that of its part of a page."""

    title: str
    unit: str
    series: Sequence[Series]
    note: str = ""
    x: str = "step"
    heading: str = ""

    def styled(self) -> Iterator[tuple[Series, str, tuple[int, ...]]]:
        """Yields the series with their colours and dashes."""
        return zip(self.series, itertools.cycle(COLOURS), itertools.cycle(DASHES))

    def as_json(self) -> Tree:
        """Returns what the page's script draws; a value that is not finite is None."""
        series: list[Tree] = []
        for one, colour, dash in self.styled():
            drawn = asdict(one) | {"c": colour, "dash": dash}
            for name in ("values", "low", "high"):
                drawn[name] = [*map(finite_or_none, drawn[name])]
            series.append(drawn)
        return {"title": self.title, "unit": self.unit, "x": self.x, "series": series}


def save_figure(charts: Sequence[Chart], path: Path) -> Path:
    """Draws the charts as panels into a PNG, PDF or SVG file, chosen by its extension; returns the path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(_MOST_COLUMNS, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), dpi=150, layout="constrained")
    for axes, chart in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).flat, charts):
        if chart is None:
            axes.set_axis_off()
            continue
        for one, colour, dash in chart.styled():
            marker = "o" if len(one.steps) <= _MARKED_POINTS else None
            style = {"color": colour, "linestyle": (0, dash), "marker": marker, "markersize": 3}
            axes.plot(one.steps, one.values, label=one.label, **style)
            if one.low:
                axes.fill_between(one.steps, one.low, one.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set(xlabel="step", ylabel=chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, fontsize=7, frameon=False)  # below the axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def planned_charts(known: Sequence[str]) -> Iterator[tuple[Chart, list[str]]]:
    """Yields the charts that can be drawn from the known metrics, without series, each with the names of its metrics."""
    for heading, charts in CHARTS.items():
        for title, unit, patterns, note in charts:
            names = [name for pattern in patterns.split() for name in known if re.fullmatch(pattern, name)]
            if names:
                yield Chart(title=title, unit=unit, series=(), note=note, heading=heading), names


def run_charts(run: RunData) -> list[Chart]:
    """Returns the charts of the metrics that a run has."""
    return [
        replace(chart, series=[series_of(run, name) for name in names]) for chart, names in planned_charts(run.names())
    ]


def series_of(run: RunData, name: str) -> Series:
    """Returns a metric's curve, with its band if it has one: Wilson's, one standard deviation, or the range."""
    steps, values = run.series(name)
    spread = run.values_by_step(name.replace("mean", "std")) if "mean" in name else {}
    bounds: list[tuple[float, float]] = []
    if name in COUNTS:
        counts = run.values_by_step(COUNTS[name])
        bounds = [wilson_interval(v, counts.get(step)) or (v, v) for step, v in zip(steps, values, strict=True)]
    elif spread:
        widths = [spread.get(step, 0.0) for step in steps]
        bounds = [(value - width, value + width) for value, width in zip(values, widths, strict=True)]
    elif name == "response_length/mean":
        bounds = list(zip(*(run.series(f"response_length/{end}")[1] for end in ("min", "max")), strict=True))
    low, high = zip(*bounds, strict=True) if bounds else ((), ())
    label, meaning = words(name)
    return Series(label=label, help=meaning, steps=steps, values=values, low=low, high=high)


def words(name: str) -> tuple[str, str]:
    """Returns a metric's label and its definition, which ends with its name."""
    found = ((re.fullmatch(pattern, name), texts) for pattern, texts in _WORDS.items())
    plain = name.partition("/")[2].replace("_", " ")
    label, meaning = next(
        ((label.format(*match.groups()), help) for match, (label, help) in found if match), (plain, "")
    )
    return label, f"{meaning + '; ' if meaning else ''}{name}"
