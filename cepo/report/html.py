"""Writes a self-contained HTML page with its styles, scripts and data, which loads nothing from a network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cepo.report.charts import Chart, chart_data
from cepo.tracking.run_folder import THUMBNAIL, write_atomically

_ASSETS = Path(__file__).parent / "assets"
_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""


@dataclass(frozen=True)
class Thumbnail:
    """A cell with a small image, given as a data URI."""

    uri: str


@dataclass(frozen=True)
class Bar:
    """A cell with a number, its text and a bar; `places` are start, end, low, high and limit in percent of the scale."""

    value: float
    text: str
    places: Mapping[str, float]


Content = str | float | tuple[float, str] | Thumbnail | Bar | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading, and searches if it is long.

    Numbers show 3 digits and keep the exact value; a pair is a number with its text. `filters` are the columns, by
    number, of which the reader can choose one text.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Content]]
    caption: str = ""
    filters: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A graded response; `name` says to which problem, and to which of its samples."""

    name: str
    problem: str
    answer: str
    response: str
    right: bool
    image: str | None = None


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


def samples_table(measured: Mapping[str, Iterable[Sample]]) -> Table:
    """Returns the responses of one or two measurements, by their names, side by side; changed verdicts are first."""
    found: dict[str, dict[str, Sample]] = {}
    for label, samples in measured.items():
        for sample in samples:
            found.setdefault(sample.name, {})[label] = sample
    listed: list[tuple[str, str | None, list[Content]]] = []
    for of_problem in found.values():
        one, *_ = samples = list(of_problem.values())
        verdict = " → ".join(dict.fromkeys("right" if each.right else "wrong" for each in samples))
        image = next((each.image for each in samples if THUMBNAIL.fullmatch(each.image or "")), None)
        texts = [of_problem[label].response if label in of_problem else None for label in measured]
        listed.append((verdict, image, [one.problem.replace("<image>", ""), one.answer, *texts]))
    listed.sort(key=lambda row: ("→" not in row[0], row[0] == "right"))
    sizes = itertools.accumulate(len("".join(map(str, texts))) for _, _, texts in listed)
    shown = [row for row, size in zip(listed, sizes, strict=True) if size <= _MOST_CHARACTERS]
    has_images = any(image for _, image, _ in shown)
    return Table(
        head=[
            "verdict",
            *["image"][: int(has_images)],
            "problem",
            "answer",
            *(f"response {each}" for each in measured),
        ],
        rows=[[verdict, *[image and Thumbnail(image)][: int(has_images)], *texts] for verdict, image, texts in shown],
        caption=f"{len(shown):,} of {len(listed):,} responses, changed and wrong ones first",
        filters=(0,),
    )


def bars(figures: Sequence[tuple[float, str, float, float] | None], limit: float | None) -> list[Bar | None]:
    """Returns a column of bars on one scale: of each a value, its text, and the ends of its interval; None stays None."""
    ends = [0.0, *([] if limit is None else [limit])]
    ends += [number for figure in figures if figure for number in (figure[0], *figure[2:])]
    least, size = min(ends), (max(ends) - min(ends)) or 1.0

    def bar(figure: tuple[float, str, float, float] | None) -> Bar | None:
        if figure is None:
            return None
        value, text, low, high = figure
        numbers = {"start": min(value, 0.0), "end": max(value, 0.0), "low": low, "high": high}
        numbers |= {} if limit is None else {"limit": limit}
        return Bar(value, text, {name: round(100 * (number - least) / size, 2) for name, number in numbers.items()})

    return [bar(figure) for figure in figures]


def write_page(
    path: Path,
    *,
    title: str,
    story: Story | None = None,
    sections: Sequence[Section] = (),
    credit: Mapping[str, Any] | None = None,
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
        title=title,
        story=story,
        sections=sections,
        credit=credit,
        clocks=clocks or {},
        charts_from=next(
            (place for place, part in enumerate(sections, 1) if any(c.x == "step" for c in part.charts)), 0
        ),
        style=_asset("page.css"),
        scripts=[_asset("page.js"), *([_asset("credit.js")] if credit else [])],
        data=chart_data,
        is_number=lambda cell: isinstance(cell, int | float),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
