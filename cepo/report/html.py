"""Writes a self-contained HTML page with its styles, scripts and data, which loads nothing from a network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.report.charts import Chart
from cepo.report.score_tables import NOTHING, Cell, ScoreTable
from cepo.tracking.run_folder import THUMBNAIL, write_atomically
from cepo.trees import Fields

_ASSETS = Path(__file__).parent / "assets"
_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""
Sample = tuple[str, bool, Mapping[str, object]]
"""A graded response: its name, which says to which problem, the verdict, and the recorded row."""


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
    """Writes a page and returns its path. All texts are escaped.

    The first screen has the `results`, of each measure its value, name and change, and the chart `first` beside a rollout
    of `credit`, the result of `credit_view.credit_view`, which is shown above the sections.
    `clocks` are further axes for the charts, as values by step.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shown = {"title": title, "subtitle": subtitle, "results": results, "first": first, "sections": sections}
    text = environment.get_template("page.html").render(shown, credit=credit, clocks=clocks or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path
