"""Writes a self-contained HTML page with its styles, scripts and data, which loads nothing from a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cepo.report.charts import Chart, bokeh_item
from cepo.tracking.run_folder import write_atomically

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader sorts by clicking on a heading. Numbers show 6 digits and keep the exact value."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading; `notes` are above its charts, and tables below."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    closed: bool = False


def write_page(
    path: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    sections: Sequence[Section] = (),
    credit: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a page and returns its path. All texts are escaped.

    Args:
        facts: names and values below the title.
        credit: the result of `credit_view.credit_view`, shown above the sections.
    """
    from jinja2 import Environment, FileSystemLoader

    charts = [chart for section in sections for chart in section.charts]
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # BokehJS reads objects before references to them
    text = environment.get_template("page.html").render(
        title=title,
        facts=facts,
        sections=sections,
        credit=credit,
        style=_asset("page.css"),
        scripts=[*([_bokeh()] if charts else []), _asset("page.js"), *([_asset("credit.js")] if credit else [])],
        item=bokeh_item,
        is_number=lambda cell: isinstance(cell, int | float),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _bokeh() -> str:
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
