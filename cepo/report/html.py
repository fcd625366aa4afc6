"""Writes a self-contained HTML page with its styles, scripts and data, which loads nothing from a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cepo.report.charts import Chart, chart_data
from cepo.tracking.run_folder import write_atomically

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading.

    Numbers show 3 digits and keep the exact value; a pair is a number with its text.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | float | tuple[float, str] | None]]
    caption: str = ""


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
        charts_from=next((place for place, section in enumerate(sections, 1) if section.charts), 0),
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
