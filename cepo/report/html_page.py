"""Writes a page: one HTML file with all its texts, numbers, styles and scripts, which loads nothing from a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.files.trees import Fields
from cepo.report.credit_view import CreditView
from cepo.report.drawing import Chart
from cepo.report.score_tables import NOTHING, Cell, ScoreTable
from cepo.report.shown_responses import CreditedResponse
from cepo.run_folder.writing import write_atomically
from cepo.terminal.lines import without_controls

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading, and searches if it is long.

    Numbers show 3 digits and keep the exact value. A mapping has a `text`, with the `value` by which it sorts, or with the
    number of a `picture` among `pictures`, which are data URIs. Of the columns `filters`, by number, the reader can choose
    one text. On a phone the rows of `is_of_cards` become cards. Texts of the columns `typeset` show Markdown and LaTeX as they
    read, until the reader asks for what is written.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | float | Fields]]
    caption: str = ""
    filters: Sequence[int] = ()
    pictures: Sequence[str] = ()
    typeset: Sequence[int] = ()
    is_of_cards: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number of the first screen with its name, how it has changed, and how it was measured."""

    value: str
    name: str
    change: str = ""
    details: str = ""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A row of a dot plot: a mean, and that less and plus its standard error, in percent of the scale, and its text."""

    name: str
    kind: str
    place: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True, kw_only=True)
class DotPlot:
    """Rows with dots on one scale from 0, or the lowest number, to the highest; `ceiling` is marked across them.

    `ends` are the figures at both ends of the scale.
    """

    title: str
    note: str
    dots: Sequence[Dot]
    zero: float
    ends: tuple[str, str]
    ceiling: float | None
    ceiling_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading: notes, then charts, dots, responses and tables."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    dots: DotPlot | None = None
    responses: Sequence[CreditedResponse] = ()
    tables: Sequence[Table] = ()
    closed: bool = True


def table_of_scores(table: ScoreTable, *, first: str) -> Table:
    """Returns a table of scores for a page; `first` is the heading of the rows' names."""
    rows: list[list[str | Fields]] = []
    for scores in table.rows:
        row: list[str | Fields] = [scores.name]
        for column in table.columns:
            cell = scores.cells.get(column.name, "")
            if isinstance(cell, Cell):
                row.append({"text": column.shown(cell), "value": cell.mean})
            else:
                row.append(cell or {"text": NOTHING, "value": "-Infinity"})  # sorts below all numbers
        rows.append(row)
    names = [column.name for column in table.columns]
    return Table(head=[first, *names], rows=rows, caption=table.title, is_of_cards=True)


def write_page(
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    headline: str = "",
    warnings: Sequence[str] = (),
    results: Sequence[Result] = (),
    first: Chart | None = None,
    credit: CreditView | None = None,
    sections: Sequence[Section] = (),
    clocks: Mapping[str, Mapping[int, float]] | None = None,
) -> Path:
    """Writes a page and returns its path. All texts are escaped, and control characters replaced.

    Args:
        headline: the answer in one sentence, above all else; `warnings` follow it, and `results`.
        first: the chart of the first screen.
        credit: the responses beside that chart, and the data of the credit view.
        clocks: further axes for the charts, as values by step.
    """
    return write_template(
        path,
        _ASSETS / "page.html",
        title=title,
        subtitle=subtitle,
        headline=headline,
        warnings=warnings,
        results=results,
        first=first,
        credit=credit,
        sections=sections,
        clocks=clocks or {},
    )


def write_template(path: Path, template: Path, **values: object) -> Path:
    """Writes a template with its values, as `rendered` returns it, and returns the path."""
    text = rendered(template, **values)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    return path


def rendered(template: Path, **values: object) -> str:
    """Returns a template with its values, whose texts are escaped, without control characters."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(template.parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return without_controls(environment.get_template(template.name).render(values))
