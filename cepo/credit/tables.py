"""Presents a measurement of credit as tables for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Mapping

from cepo.credit.agreement import QUARTERS
from cepo.files.trees import Fields
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow

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
    "wrong": "nats of wrong responses",
}
_CONTRAST = {"decisive": "on decisive tokens, nats", "noise": "noise on the others, nats", "ratio": "contrast to noise"}
_PARTS = {
    "knowledge": ("What teachers know of right and wrong responses, in nats per response", _KNOWLEDGE),
    "credit": ("Credit of a token, against A*", _CREDIT),
    "value": ("Value of a prefix, against V", _VALUE),
    "contrast": ("Evidence of decisive tokens, against its noise", _CONTRAST),
}


def credit_tables(results: Fields, *, with_kinds: bool = False) -> list[ScoreTable]:
    """Returns the tables with 95 % intervals; an undefined figure has no cell. With kinds, a row's name ends with its kind."""
    tables: list[ScoreTable] = []
    for part, (title, headings) in _PARTS.items():
        if part not in results:
            continue
        rows: list[TableRow] = []
        for row in results[part]:
            name = row["name"]
            if with_kinds and "kind" in row:
                name = f"{name} ({row['kind']})"
            rows.append(TableRow(name=name, cells=_cells(row, headings)))
        tables.append(
            ScoreTable(
                title=f"{title}, ± standard error over problems",
                columns=[Column(name=heading, digits=3) for heading in headings.values()],
                rows=rows,
                notes=notes_on_work(results["counts"]) if part == "credit" else (),
            )
        )
    return tables


def _cells(row: Fields, headings: Mapping[str, str]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name, heading in headings.items():
        figure = row[name]
        if figure["value"] is not None:
            cells[heading] = Cell(
                mean=figure["value"],
                error=figure["error"],
                low=figure["low"],
                high=figure["high"],
            )
    return cells


def notes_on_work(counts: Fields) -> list[str]:
    share = counts["decisive_tokens"] / counts["tokens"]
    return [
        f"{counts['responses']} responses to {counts['problems']} problems, {counts['tokens']:,} tokens, of which "
        f"{100 * share:.1f} % are decisive (|A*| > 0.25).",
        f"{counts['continuations']:,} continuations of {counts['prefixes']:,} prefixes with {counts['tokens_sampled']:,} "
        f"sampled tokens; {counts['share_right']:.3f} of all responses are right.",
    ]
