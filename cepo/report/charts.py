"""Draws charts over steps, with Bokeh for pages and matplotlib for papers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The page replaces these two placeholders with its own colours of text and grid, for a light or a dark screen.
INK, GRID = "#010203", "#040506"
# Okabe and Ito's colours, which people with common forms of colour blindness can distinguish; INK replaces their black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK, "#999999", "#F0E442")
DASHES = ("solid", "dashed", "dotted", "dashdot")
_ON_PAPER = {INK: "#000000"}
_MARKED_POINTS = 60
_PANEL_INCHES = (4.4, 3.2)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: a value per measured step, with an optional band from `low` to `high`."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over steps with one unit. `stacked` draws stacked bars instead; all series then have the same steps."""

    title: str
    unit: str
    series: Sequence[Series]
    note: str = ""
    stacked: bool = False


def bokeh_item(chart: Chart) -> dict[str, Any]:
    """Returns the chart as the JSON object that BokehJS embeds, with the placeholder colours `INK` and `GRID`."""
    from bokeh.embed import json_item
    from bokeh.models import BasicTicker, DataRange1d, Legend, LegendItem
    from bokeh.plotting import figure

    largest = max((abs(value) for one in chart.series for value in one.values), default=0.0)
    plot = figure(
        y_range=DataRange1d(default_span=largest or 1.0),
        height=270,
        sizing_mode="stretch_width",
        x_axis_label="step",
        y_axis_label=chart.unit,
        tools="xpan,box_zoom,reset,save",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
    )
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_label_text_color = axis.major_label_text_color = axis.axis_line_color = INK
        axis.major_tick_line_color, axis.minor_tick_line_color = INK, None
        axis.axis_label_text_font_style = "normal"
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    plot.grid.grid_line_color = GRID
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    drawn = _bars(plot, chart) if chart.stacked else _lines(plot, chart)
    items = [
        LegendItem(label=series.label, renderers=glyphs) for series, glyphs in zip(chart.series, drawn, strict=True)
    ]
    legend = Legend(items=items, click_policy="hide", orientation="horizontal", ncols=2, location="left")
    legend.background_fill_alpha = legend.border_line_alpha = 0
    legend.label_text_color, legend.label_text_font_size = INK, "12px"
    plot.add_layout(legend, "below")
    return dict(json_item(plot))


def _lines(plot: Any, chart: Chart) -> list[list[Any]]:
    drawn: list[list[Any]] = []
    for series, colour, dash in zip(chart.series, itertools.cycle(COLOURS), itertools.cycle(DASHES)):
        data = {"step": list(series.steps), "value": list(series.values)}
        glyphs = [plot.line("step", "value", source=data, color=colour, line_dash=dash, line_width=2)]
        if len(series.steps) <= _MARKED_POINTS:
            glyphs.append(plot.scatter("step", "value", source=data, color=colour, size=5))
        _add_hover(plot, glyphs[:1], series.label, "value")
        if series.low is not None and series.high is not None:
            glyphs.append(plot.varea(list(series.steps), list(series.low), list(series.high), color=colour, alpha=0.15))
        drawn.append(glyphs)
    return drawn


def _bars(plot: Any, chart: Chart) -> list[list[Any]]:
    columns = {"step": list(chart.series[0].steps)} if chart.series else {}
    columns |= {str(number): list(series.values) for number, series in enumerate(chart.series)}
    names = [str(number) for number in range(len(chart.series))]
    bars = plot.vbar_stack(names, x="step", width=0.9, source=columns, color=COLOURS[: len(names)])
    for bar, series, name in zip(bars, chart.series, names, strict=True):
        _add_hover(plot, [bar], series.label, name)
    plot.y_range.start = 0
    return [[bar] for bar in bars]


def _add_hover(plot: Any, renderers: list[Any], label: str, column: str) -> None:
    from bokeh.models import HoverTool

    tooltips = [("step", "@step"), (label, f"@{column}{{0.[00000]}}")]
    plot.add_tools(
        HoverTool(renderers=renderers, tooltips=tooltips, mode="mouse" if plot.y_range.start == 0 else "vline")
    )


def save_figure(charts: Sequence[Chart], path: Path, *, columns: int = 3) -> Path:
    """Draws the charts as panels into a PNG, PDF or SVG file, chosen by its extension; returns the path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(columns, len(charts)) or 1
    rows = -(-len(charts) // columns) or 1
    width, height = _PANEL_INCHES
    padded = [*charts, *[None] * (rows * columns - len(charts))]
    figure = Figure(figsize=(width * columns, height * rows), dpi=150, layout="constrained")
    for axes, chart in zip(figure.subplots(rows, columns, squeeze=False).flat, padded, strict=True):
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
    for series, colour, dash in zip(chart.series, itertools.cycle(COLOURS), itertools.cycle(DASHES)):
        colour = _ON_PAPER.get(colour, colour)
        if chart.stacked:
            axes.bar(series.steps, series.values, bottom=base, width=0.9, color=colour, label=series.label)
            base = [low + value for low, value in zip(base, series.values, strict=True)]
            continue
        marker = "o" if len(series.steps) <= _MARKED_POINTS else None
        axes.plot(
            series.steps, series.values, color=colour, linestyle=dash, marker=marker, markersize=3, label=series.label
        )
        if series.low is not None and series.high is not None:
            axes.fill_between(series.steps, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
