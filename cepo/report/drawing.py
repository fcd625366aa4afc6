"""Defines curves and charts, and draws them as figures; `html` draws the same charts in a page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.files.trees import Tree
from cepo.run_folder.writing import finite_or_none

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Violet and grey differ in lightness too, then Okabe and Ito's colours, which people with common forms of colour blindness
# can distinguish. Blue and orange are those of tokens, green and red those of verdicts.
COLOURS = ("#5B3FA0", "#777777", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#A0522D", "#F0E442")
DASHES = ((), (6, 4), (2, 3), (6, 3, 2, 3))
_SHARE = "fraction"
"""The beginning of the unit of charts that a page draws in percent."""
_MARKED_POINTS = 60
_PANEL_INCHES = (4.4, 3.2)
_MOST_COLUMNS = 3


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

    @property
    def is_share(self) -> bool:
        """Whether the values are fractions, which a page shows in percent."""
        return self.unit.startswith(_SHARE)

    @property
    def unit_on_page(self) -> str:
        return self.unit.replace(_SHARE, "%", 1) if self.is_share else self.unit

    def styled(self) -> Iterator[tuple[Series, str, tuple[int, ...]]]:
        """Yields the series with their colours and dashes."""
        return zip(self.series, itertools.cycle(COLOURS), itertools.cycle(DASHES))

    def as_json(self) -> Tree:
        """Returns what the page's script draws; a value that is not finite is None."""
        series: list[Tree] = []
        for styled_series, colour, dash in self.styled():
            curve: Tree = asdict(styled_series)
            curve["colour"] = colour
            curve["dash"] = dash
            for name in ("values", "low", "high"):
                curve[name] = [finite_or_none(value) for value in curve[name]]
            series.append(curve)
        return {
            "title": self.title,
            "unit": self.unit_on_page,
            "x": self.x,
            "isShare": self.is_share,
            "series": series,
        }


def save_figure(charts: Sequence[Chart], path: Path) -> Path:
    """Draws the charts as panels into a PNG, PDF or SVG file, chosen by its extension; returns the path."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    width, height = _PANEL_INCHES
    with rc_context({"text.parse_math": False}):  # a name of a metric or a setting may have dollars
        figure = Figure(figsize=(width * columns, height * rows), dpi=150, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in itertools.zip_longest(panels, charts):
            if chart is None:
                axes.set_axis_off()
            else:
                _draw(chart, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(chart: Chart, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for curve, colour, dash in chart.styled():
        axes.plot(
            curve.steps,
            curve.values,
            label=curve.label,
            color=colour,
            linestyle=(0, dash),
            marker="o" if len(curve.steps) <= _MARKED_POINTS else None,
            markersize=3,
        )
        if curve.low:
            axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.set(xlabel="step", ylabel=chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, fontsize=7, frameon=False)  # below the axes
