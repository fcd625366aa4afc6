"""The charts of a run, which `charts.toml` lists with what metrics mean, and the bands of their curves."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cepo.metrics import wilson_interval
from cepo.report.drawing import Chart, Series
from cepo.report.html_page import Section
from cepo.report.recorded_run import COUNTS

Curves = Mapping[str, Mapping[int, float]]
"""Metrics by name and step."""
LEARNING = "Learning"
LENGTH = "Response length"
HELD_OUT = "Held-out accuracy"
_TABLES = tomllib.loads(Path(__file__).with_name("charts.toml").read_text(encoding="utf-8"))


def planned_charts(known: Sequence[str]) -> Iterator[tuple[Chart, list[str]]]:
    """Yields the charts that can be drawn from the known metrics, without series, each with the names of its metrics."""
    for described in _TABLES["charts"]:
        chart = Chart(series=(), **{name: text for name, text in described.items() if name != "metrics"})
        names: list[str] = []
        for pattern in described["metrics"].split():
            names += [name for name in known if re.fullmatch(pattern, name)]
        if names:
            yield chart, names


def charts_of(curves: Curves) -> list[Chart]:
    """Returns the charts that can be drawn from a run's metrics."""
    charts: list[Chart] = []
    for chart, names in planned_charts(sorted(curves)):
        charts.append(replace(chart, series=[series_of(curves, name) for name in names]))
    return charts


def chart_sections(charts: Sequence[Chart]) -> Iterator[Section]:
    """Yields the parts of a page with charts, the part on learning open. Curves that are always 0 are named only."""
    for heading, charts_of_heading in itertools.groupby(charts, key=lambda chart: chart.heading):
        drawn_charts: list[Chart] = []
        zero_curves: list[str] = []
        for chart in charts_of_heading:
            curves = [series for series in chart.series if any(series.values)]
            zero_curves += [f"{chart.title}: {series.label}" for series in chart.series if not any(series.values)]
            if curves:
                drawn_charts.append(replace(chart, series=curves))
        notes: list[str] = []
        if zero_curves:
            notes.append(f"Always 0, and not drawn: {'; '.join(zero_curves)}.")
        yield Section(title=heading, charts=drawn_charts, notes=notes, closed=heading != LEARNING)


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
    for pattern, (label, meaning) in _TABLES["words"].items():
        match = re.fullmatch(pattern, name)
        if match:
            return label.format(*match.groups()), f"{meaning}; {name}"
    _, _, name_in_group = name.partition("/")
    return name_in_group.replace("_", " "), name
