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
_PANEL_INCHES = (4.4, 3.2)
_MOST_COLUMNS = 3
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
        for drawn_series, colour, dash in self.styled():
            curve = asdict(drawn_series) | {"c": colour, "dash": dash}
            for name in ("values", "low", "high"):
                curve[name] = [finite_or_none(value) for value in curve[name]]
            series.append(curve)
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
    samples_by_name: dict[str, dict[str, Sample]] = {}
    for label, samples in measured.items():
        for sample in samples:
            name, _, _ = sample
            samples_by_name.setdefault(name, {})[label] = sample
    responses = [_SampledResponse.of(by_label, list(measured)) for by_label in samples_by_name.values()]
    responses.sort(key=lambda response: ("→" not in response.verdict, response.verdict == "right"))
    rows: list[list[str | Fields]] = []
    num_characters = 0
    for response in responses:
        num_characters += len(response.problem) + len(response.answer) + sum(map(len, response.texts))
        if num_characters > _MOST_CHARACTERS:
            break
        image = response.image if THUMBNAIL.fullmatch(response.image) else ""
        problem = {"text": response.problem, "image": image}
        rows.append([response.verdict, problem, response.answer, *response.texts])
    return Table(
        head=["verdict", "problem", "answer", *(f"response {label}" for label in measured)],
        rows=rows,
        caption=f"{len(rows):,} of {len(responses):,} responses, changed and wrong ones first",
        filters=(0,),
    )


@dataclass(frozen=True, kw_only=True)
class _SampledResponse:
    """A row of a table of samples: the same response's text in each measurement, with its verdicts in their order."""

    verdict: str
    image: str
    problem: str
    answer: str
    texts: Sequence[str]

    @classmethod
    def of(cls, by_label: Mapping[str, Sample], labels: Sequence[str]) -> _SampledResponse:
        verdicts = ["right" if is_right else "wrong" for _, is_right, _ in by_label.values()]
        texts: list[str] = []
        for label in labels:
            if label in by_label:
                _, _, row = by_label[label]
                texts.append(str(row.get("response", "")))
            else:
                texts.append("")
        _, _, first_row = next(iter(by_label.values()))
        problem = str(first_row.get("problem") or "")
        return cls(
            verdict=" → ".join(dict.fromkeys(verdicts)),
            image=str(first_row.get("image") or ""),
            problem=problem.replace("<image>", ""),
            answer=str(first_row.get("ground_truth") or ""),
            texts=texts,
        )


def scores(table: ScoreTable, *, first: str, limit: str = "") -> Table:
    """Returns a table of scores for a page, with bars for cells with intervals.

    `first` is the heading of the rows' names; the row whose name begins with `limit` is marked across the bars.
    """
    rows: list[list[str | Fields]] = [[row.name] for row in table.rows]
    for column in table.columns:
        scale = _Scale.of_column(table, column.name, limit)
        for row, scores_of_row in zip(rows, table.rows, strict=True):
            cell = scores_of_row.cells.get(column.name, "")
            if isinstance(cell, Cell):
                row.append({"text": column.shown(cell), "value": cell.mean, "bar": scale.bar(cell)})
            else:
                row.append(cell or {"text": NOTHING, "value": "-Infinity"})  # sorts below all numbers
    return Table(head=[first, *(column.name for column in table.columns)], rows=rows, caption=table.title)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """The range of a column's bars: 0 and all its means and intervals. `limit` is marked across the bars."""

    least: float
    size: float
    limit: float | None

    @classmethod
    def of_column(cls, table: ScoreTable, name: str, name_of_limit: str) -> _Scale:
        ends = [0.0]
        limit: float | None = None
        for row in table.rows:
            cell = row.cells.get(name, "")
            if not isinstance(cell, Cell):
                continue
            ends += [end for end in (cell.mean, cell.low, cell.high) if end is not None]
            if limit is None and name_of_limit and row.name.startswith(name_of_limit):
                limit = cell.mean
        least = min(ends)
        return cls(least=least, size=(max(ends) - least) or 1.0, limit=limit)

    def bar(self, cell: Cell) -> dict[str, float] | None:
        """Returns the places of a bar in percent of the scale; None without an interval."""
        if cell.low is None or cell.high is None:
            return None
        places = {
            "start": min(cell.mean, 0.0),
            "end": max(cell.mean, 0.0),
            "low": cell.low,
            "high": cell.high,
        }
        if self.limit is not None:
            places["limit"] = self.limit
        return {name: round(100 * (place - self.least) / self.size, 2) for name, place in places.items()}


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

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    text = template.render(
        title=title,
        subtitle=subtitle,
        results=results,
        first=first,
        sections=sections,
        credit=credit,
        clocks=clocks or {},
    )
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
