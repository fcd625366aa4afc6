"""Draws charts, tables and sections: as a self-contained HTML page, which loads nothing from a network, or as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cepo.files.trees import Fields, Tree
from cepo.report.score_tables import NOTHING, Cell, ScoreTable
from cepo.run_folder.pictures import THUMBNAIL
from cepo.run_folder.writing import finite_or_none, write_atomically
from cepo.terminal.lines import without_controls

# Okabe and Ito's colours, which people with common forms of colour blindness can distinguish, with grey for black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777", "#A0522D", "#F0E442")
DASHES = ((), (6, 4), (2, 3), (6, 3, 2, 3))
_MARKED_POINTS = 60
_PANEL_INCHES, _MOST_COLUMNS = (4.4, 3.2), 3
_ASSETS = Path(__file__).parent / "assets"
_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""
Sample = tuple[str, bool, Mapping[str, object]]
"""A graded response: its name, which says to which problem, the verdict, and the recorded row."""


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


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading, and searches if it is long.

    Numbers show 3 digits and keep the exact value. A mapping has a `text` with an `image` (a data URI), or with the `value`
    by which it sorts and a `bar` (start, end, low, high and limit in percent of the scale). Of the columns `filters`, by
    number, the reader can choose one text.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | float | Fields]]
    caption: str = ""
    filters: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading; `notes` are above its charts, and tables below."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    closed: bool = True


def samples_table(measured: Mapping[str, Iterable[Sample]]) -> Table:
    """Returns the responses of one or two measurements, by their names, side by side; changed verdicts are first."""
    found: dict[str, dict[str, Sample]] = {}
    for label, samples in measured.items():
        for sample in samples:
            found.setdefault(sample[0], {})[label] = sample
    rows: list[list[str]] = []
    for by_label in found.values():
        verdict = " → ".join(dict.fromkeys("right" if right else "wrong" for _, right, _ in by_label.values()))
        responses = [str(by_label[label][2].get("response", "")) if label in by_label else "" for label in measured]
        _, _, row = next(iter(by_label.values()))
        image, problem, answer = (str(row.get(key) or "") for key in ("image", "problem", "ground_truth"))
        rows.append([verdict, image, problem.replace("<image>", ""), answer, *responses])
    rows.sort(key=lambda row: ("→" not in row[0], row[0] == "right"))
    sizes = itertools.accumulate(sum(map(len, row[2:])) for row in rows)
    shown = [
        [verdict, {"text": problem, "image": image if THUMBNAIL.fullmatch(image) else ""}, *texts]
        for (verdict, image, problem, *texts), size in zip(rows, sizes, strict=True)
        if size <= _MOST_CHARACTERS
    ]
    return Table(
        head=["verdict", "problem", "answer", *(f"response {label}" for label in measured)],
        rows=shown,
        caption=f"{len(shown):,} of {len(rows):,} responses, changed and wrong ones first",
        filters=(0,),
    )


def scores(table: ScoreTable, *, first: str, limit: str = "") -> Table:
    """Returns a table of scores for a page, with bars for cells with intervals.

    `first` is the heading of the rows' names; the row whose name begins with `limit` is marked across the bars.
    """
    rows: list[list[str | Fields]] = [[row.name] for row in table.rows]
    for column in table.columns:
        cells = [row.cells.get(column.name, "") for row in table.rows]
        known = {row.name: cell for row, cell in zip(table.rows, cells, strict=True) if isinstance(cell, Cell)}
        limits = [cell.mean for name, cell in known.items() if limit and name.startswith(limit)]
        ends = [0.0, *(end for cell in known.values() for end in (cell.mean, cell.low, cell.high) if end is not None)]
        least, size = min(ends), (max(ends) - min(ends)) or 1.0
        for row, cell in zip(rows, cells, strict=True):
            if isinstance(cell, str):
                row.append(cell or {"text": NOTHING, "value": "-Infinity"})  # sorts below all numbers
                continue
            bar = None
            if cell.low is not None and cell.high is not None:
                places = {"start": min(cell.mean, 0.0), "end": max(cell.mean, 0.0), "low": cell.low, "high": cell.high}
                places |= {"limit": limits[0]} if limits else {}
                bar = {name: round(100 * (place - least) / size, 2) for name, place in places.items()}
            row.append({"text": column.shown(cell), "value": cell.mean, "bar": bar})
    return Table(head=[first, *(column.name for column in table.columns)], rows=rows, caption=table.title)


def write_page(
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    results: Sequence[tuple[str, str, str]] = (),
    first: Chart | None = None,
    sections: Sequence[Section] = (),
    credit: Mapping[str, object] | None = None,
    clocks: Mapping[str, Mapping[int, float]] | None = None,
) -> Path:
    """Writes a page and returns its path. All texts are escaped, and control characters replaced.

    The first screen has the `results`, of each measure its value, name and change, and the chart `first` beside a rollout
    of `credit`, the result of `credit_view.credit_view`, which is shown above the sections.
    `clocks` are further axes for the charts, as values by step.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shown = {"title": title, "subtitle": subtitle, "results": results, "first": first, "sections": sections}
    text = environment.get_template("page.html").render(shown, credit=credit, clocks=clocks or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, without_controls(text).encode())
    return path


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
