"""Writes a self-contained HTML page with its styles, scripts and data, which loads nothing from a network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.report.charts import Chart
from cepo.report.score_tables import Cell, ScoreTable
from cepo.tracking.run_folder import THUMBNAIL, write_atomically

_ASSETS = Path(__file__).parent / "assets"
_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A cell with a number by which it sorts and its text, an image as a data URI, or a bar.

    Attributes:
        bar: start, end, low, high and limit in percent of the scale.
    """

    text: str = ""
    value: float | None = None
    image: str = ""
    bar: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading, and searches if it is long.

    Numbers show 3 digits and keep the exact value. `filters` are the columns, by number, of which the reader can choose
    one text.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | float | Shown]]
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


@dataclass(frozen=True, kw_only=True)
class Story:
    """The first screen: one line on the run, its results, and the chart of what it learned.

    Attributes:
        results: of each measure its value, its name, and how it changed.
    """

    subtitle: str
    results: Sequence[tuple[str, str, str]] = ()
    chart: Chart | None = None


Sample = tuple[str, bool, Mapping[str, object]]
"""A graded response: its name, which says to which problem, the verdict, and the recorded row."""


def samples_table(measured: Mapping[str, Iterable[Sample]]) -> Table:
    """Returns the responses of one or two measurements, by their names, side by side; changed verdicts are first."""
    found: dict[str, dict[str, tuple[bool, Mapping[str, object]]]] = {}
    for label, samples in measured.items():
        for name, right, row in samples:
            found.setdefault(name, {})[label] = (right, row)
    listed: list[tuple[str, str, list[str]]] = []
    for by_label in found.values():
        rows = {label: row for label, (_, row) in by_label.items()}
        verdict = " → ".join(dict.fromkeys("right" if right else "wrong" for right, _ in by_label.values()))
        image = next((image for row in rows.values() if THUMBNAIL.fullmatch(image := str(row.get("image")))), "")
        problem, answer = (str(next(iter(rows.values())).get(key, "")) for key in ("problem", "ground_truth"))
        texts = [
            problem.replace("<image>", ""),
            answer,
            *(str(rows.get(each, {}).get("response", "")) for each in measured),
        ]
        listed.append((verdict, image, texts))
    listed.sort(key=lambda row: ("→" not in row[0], row[0] == "right"))
    sizes = itertools.accumulate(sum(map(len, texts)) for _, _, texts in listed)
    shown = [row for row, size in zip(listed, sizes, strict=True) if size <= _MOST_CHARACTERS]
    images = ["image"] if any(image for _, image, _ in shown) else []
    return Table(
        head=["verdict", *images, "problem", "answer", *(f"response {label}" for label in measured)],
        rows=[[verdict, *(Shown(image=image) for _ in images), *texts] for verdict, image, texts in shown],
        caption=f"{len(shown):,} of {len(listed):,} responses, changed and wrong ones first",
        filters=(0,),
    )


def scores(table: ScoreTable, *, first: str, limit: str = "") -> Table:
    """Returns a table of scores for a page: with bars if its cells have intervals.

    Args:
        first: the heading of the rows' names.
        limit: the beginning of the name of the row that is marked across the bars.
    """
    rows: list[list[str | float | Shown]] = [[row.name] for row in table.rows]
    for column in table.columns:
        cells = [row.cells.get(column.name, "") for row in table.rows]
        limits = [
            cell.mean
            for row, cell in zip(table.rows, cells, strict=True)
            if limit and row.name.startswith(limit) and isinstance(cell, Cell)
        ]
        known = [(cell.mean, cell.low, cell.high) for cell in cells if isinstance(cell, Cell)]
        ends = [0.0, *limits, *(end for three in known for end in three if end is not None)]
        least, size = min(ends), (max(ends) - min(ends)) or 1.0
        for row, cell in zip(rows, cells, strict=True):
            bar, value = None, cell.mean if isinstance(cell, Cell) else None
            if isinstance(cell, Cell) and cell.low is not None and cell.high is not None:
                places = {"start": min(cell.mean, 0.0), "end": max(cell.mean, 0.0), "low": cell.low, "high": cell.high}
                places |= dict.fromkeys(["limit"], *limits) if limits else {}
                bar = {name: round(100 * (number - least) / size, 2) for name, number in places.items()}
            row.append(Shown(text=(cell or "–") if isinstance(cell, str) else column.shown(cell), value=value, bar=bar))
    return Table(head=[first, *(column.name for column in table.columns)], rows=rows, caption=table.title)


def write_page(
    path: Path,
    *,
    title: str,
    story: Story | None = None,
    sections: Sequence[Section] = (),
    credit: Mapping[str, object] | None = None,
    clocks: Mapping[str, Mapping[int, float]] | None = None,
) -> Path:
    """Writes a page and returns its path. All texts are escaped.

    Args:
        credit: the result of `credit_view.credit_view`, shown above the sections.
        clocks: other axes for the charts than the step, as values by step.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html").render(
        title=title, story=story, sections=sections, credit=credit, clocks=clocks or {}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path
