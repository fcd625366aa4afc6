"""Charts over steps: as data for pages, whose script draws them, and drawn with matplotlib for papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cepo.trees import Tree

# Okabe and Ito's colours, which people with common forms of colour blindness can distinguish, with grey for black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777", "#A0522D", "#F0E442")
DASHES = ((), (6, 4), (2, 3), (6, 3, 2, 3))
_MARKED_POINTS = 60
_PANEL_INCHES = (4.4, 3.2)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: a value per measured step, with an optional band from `low` to `high`. `help` defines the quantity."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over steps, or over `x`, with one unit. `stacked` draws bars instead; all series then have the same steps."""

    title: str
    unit: str
    series: Sequence[Series]
    note: str = ""
    stacked: bool = False
    x: str = "step"

    def without_zeros(self) -> Chart | None:
        """Returns the chart without series that are always 0; None if nothing is left."""
        series = [one for one in self.series if any(one.values)]
        return replace(self, series=series) if series else None

    def styled(self) -> Iterator[tuple[Series, str, tuple[int, ...]]]:
        """Yields the series with their colours and dashes."""
        return zip(self.series, itertools.cycle(COLOURS), itertools.cycle(DASHES))

    def as_json(self) -> Tree:
        """Returns what the page's script draws; a value that is not finite is None."""

        def finite(values: Sequence[float] | None) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in values or ()]

        series = [
            asdict(one)
            | {name: finite(getattr(one, name)) for name in ("values", "low", "high")}
            | {"c": colour, "dash": dash}
            for one, colour, dash in self.styled()
        ]
        return {"title": self.title, "unit": self.unit, "x": self.x, "stacked": self.stacked, "series": series}


def save_figure(charts: Sequence[Chart], path: Path, *, columns: int = 3) -> Path:
    """Draws the charts as panels into a PNG, PDF or SVG file, chosen by its extension; returns the path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(columns, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), dpi=150, layout="constrained")
    for axes, chart in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).flat, charts):
        if chart is None:
            axes.set_axis_off()
            continue
        _draw(axes, chart)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set(xlabel="step", ylabel=chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, fontsize=7, frameon=False)  # below the axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Any, chart: Chart) -> None:
    base = [0.0] * (len(chart.series[0].steps) if chart.stacked else 0)
    for series, colour, dash in chart.styled():
        if chart.stacked:
            axes.bar(series.steps, series.values, bottom=base, width=0.9, color=colour, label=series.label)
            base = [low + value for low, value in zip(base, series.values, strict=True)]
            continue
        marker = "o" if len(series.steps) <= _MARKED_POINTS else None
        style = {"color": colour, "linestyle": (0, dash), "marker": marker, "markersize": 3}
        axes.plot(series.steps, series.values, label=series.label, **style)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.steps, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
