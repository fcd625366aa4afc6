"""Presents the results of a measurement: tables for the terminal and Markdown, and a page with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.credit.knowledge import QUARTERS
from cepo.report.charts import Chart, Series
from cepo.report.html import Section, Story, Table, bars, write_page
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow

PAGE_FILE = "credit.html"
_ORACLE = "oracle"
_CREDIT = {
    "pearson": "Pearson",
    "pearson_corrected": "Pearson corrected",
    "spearman": "Spearman",
    "spearman_corrected": "Spearman corrected",
    "auroc": "AUROC",
    "top_hit": "top-1 hit",
    "share_on_decisive": "share on decisive",
    "sign_agreement": "sign agreement",
}
_VALUE = {"pearson": "Pearson", "pearson_corrected": "Pearson corrected", "calibration_error": "calibration error"}
_KNOWLEDGE = {
    "nats": "nats",
    **{quarter: f"{quarter} quarter" for quarter in QUARTERS},
    "limit": "limit, -log p",
}
_PARTS = (
    (
        "knowledge",
        "What teachers know of right responses, in nats per response, ± standard error over problems",
        _KNOWLEDGE,
    ),
    ("credit", "Credit of a token, against A*, ± standard error over problems", _CREDIT),
    ("value", "Value of a prefix, against V, ± standard error over problems", _VALUE),
)


def credit_tables(results: Mapping[str, Any]) -> list[ScoreTable]:
    """Returns the tables of credits and of values; a figure that is undefined has no cell."""
    return [
        ScoreTable(
            title=title,
            columns=[Column(name=column, digits=3) for column in columns.values()],
            rows=[
                TableRow(
                    name=row["name"],
                    cells={
                        column: Cell(mean=row[name]["value"], error=row[name]["error"])
                        for name, column in columns.items()
                        if row[name]["value"] is not None
                    },
                )
                for row in results[part]
            ],
            notes=_notes(results["counts"]) if part == "credit" else (),
        )
        for part, title, columns in _PARTS
        if part in results
    ]


def write_credit_page(results: Mapping[str, Any], out: Path) -> Path:
    """Writes the page of a measurement: its tables as bars with 95 % intervals, and the values' calibration curves."""
    description, sections = results["description"], list[Section]()
    if results["knowledge"]:
        sections.append(Section(title="Knowledge", closed=False, notes=[_KNOWING], tables=[_bar_table(results, 0)]))
    if "credit" in results:
        notes = [*_notes(results["counts"]), _LEGEND]
        sections += [
            Section(title="Credit", closed=False, notes=notes, tables=[_bar_table(results, 1)]),
            Section(title="Value", closed=False, tables=[_bar_table(results, 2)], charts=[_calibration(results)]),
        ]
    model = "/".join(Path(str(description["checkpoint"] or description["model"])).parts[-2:])
    return write_page(
        out,
        title="Credit of methods" if "credit" in results else "What teachers know",
        story=Story(subtitle=f"{model} · {description['generator']}"),
        sections=sections,
    )


def _calibration(results: Mapping[str, Any]) -> Chart:
    curves = [
        Series(label=row["name"], steps=[one["believed"] for one in points], values=[one["true"] for one in points])
        for row in results["value"]
        if (points := row.get("calibration"))
    ]
    perfect = Series(label="calibrated", steps=[0.0, 1.0], values=[0.0, 1.0], help="belief and truth are equal")
    return Chart(title="Calibration", unit="V", series=[*curves, perfect], x="believed chance of a right end")


_KNOWING = (
    "The mean log-probability ratio of teacher to student on right responses: how far the reference announces them. "
    "No teacher exceeds the limit on average. What it knows in the last quarter alone, it knows of the answer only."
)
_LEGEND = (
    "The thin line of a bar is its 95 % interval. The mark across a column is the row 'oracle': what the truth from one "
    "half of the continuations reaches against that from the other, as far as any credit can be seen to agree with it."
)


def _bar_table(results: Mapping[str, Any], number: int) -> Table:
    part, title, columns = _PARTS[number]
    rows: Sequence[Mapping[str, Any]] = results[part]
    drawn = []
    for name in columns:
        limit = next((row[name]["value"] for row in rows if row["name"] == _ORACLE), None)
        drawn.append(bars([_figure(row[name]) for row in rows], limit))
    cells = zip(*drawn, strict=True)
    names = [f"{row['name']} ({row['kind']})" if "kind" in row else row["name"] for row in rows]
    return Table(
        head=["method", *columns.values()],
        rows=[[name, *row] for name, row in zip(names, cells, strict=True)],
        caption=title,
    )


def _figure(figure: Mapping[str, float | None]) -> tuple[float, str, float, float] | None:
    value, error = figure["value"], figure["error"]
    if value is None:
        return None
    low, high = (value if figure[end] is None else figure[end] for end in ("low", "high"))
    return value, f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}", low or 0.0, high or 0.0


def _notes(counts: Mapping[str, Any]) -> list[str]:
    share = counts["decisive_tokens"] / counts["tokens"]
    return [
        f"{counts['responses']} responses to {counts['problems']} problems, {counts['tokens']:,} tokens, of which "
        f"{share:.1%} are decisive (|A*| > 0.25);",
        f"{counts['continuations']:,} continuations of {counts['prefixes']:,} prefixes with {counts['tokens_sampled']:,} "
        f"sampled tokens; {counts['share_right']:.3f} of all responses are right.",
    ]
