"""Presents the results of a measurement: tables for the terminal and Markdown, and a page with bars."""

from __future__ import annotations

from pathlib import Path

from cepo.credit.agreement import QUARTERS
from cepo.report.drawing import Chart, Section, Series, scores, write_page
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow
from cepo.trees import Fields

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
    "wrong": "nats of wrong responses",
}
_PARTS = {
    "knowledge": ("What teachers know of right and wrong responses, in nats per response", _KNOWLEDGE),
    "credit": ("Credit of a token, against A*", _CREDIT),
    "value": ("Value of a prefix, against V", _VALUE),
}


def credit_tables(results: Fields, *, with_kinds: bool = False) -> list[ScoreTable]:
    """Returns the tables with 95 % intervals; an undefined figure has no cell. With kinds, a row's name ends with its kind."""
    return [
        ScoreTable(
            title=f"{title}, ± standard error over problems",
            columns=[Column(name=column, digits=3) for column in columns.values()],
            rows=[
                TableRow(
                    name=f"{row['name']} ({row['kind']})" if with_kinds and "kind" in row else row["name"],
                    cells={
                        column: Cell(mean=found["value"], **{name: found[name] for name in ("error", "low", "high")})
                        for name, column in columns.items()
                        if (found := row[name])["value"] is not None
                    },
                )
                for row in results[part]
            ],
            notes=_notes(results["counts"]) if part == "credit" else (),
        )
        for part, (title, columns) in _PARTS.items()
        if part in results
    ]


def write_credit_page(results: Fields, out: Path) -> Path:
    """Writes the page of a measurement: its tables as bars with 95 % intervals, and the values' calibration curves."""
    description, sections = results["description"], list[Section]()
    tables = [scores(table, first="method", limit=_ORACLE) for table in credit_tables(results, with_kinds=True)]
    if results["knowledge"]:
        sections.append(Section(title="Knowledge", closed=False, notes=[_KNOWING], tables=tables[:1]))
    if "credit" in results:
        notes = [*_notes(results["counts"]), _LEGEND]
        sections += [
            Section(title="Credit", closed=False, notes=notes, tables=tables[1:2]),
            Section(title="Value", closed=False, tables=tables[2:], charts=[_calibration(results)]),
        ]
    model = "/".join(Path(str(description["checkpoint"] or description["model"])).parts[-2:])
    return write_page(
        out,
        title="Credit of methods" if "credit" in results else "What teachers know",
        subtitle=f"{model} · {description['generator']}",
        sections=sections,
    )


def _calibration(results: Fields) -> Chart:
    curves = [
        Series(label=row["name"], steps=[one["believed"] for one in points], values=[one["true"] for one in points])
        for row in results["value"]
        if (points := row.get("calibration"))
    ]
    perfect = Series(label="calibrated", steps=[0.0, 1.0], values=[0.0, 1.0], help="belief and truth are equal")
    return Chart(title="Calibration", unit="V", series=[*curves, perfect], x="believed chance of a right end")


_KNOWING = (
    "The mean log-probability ratio of teacher to student on right responses: how far the reference announces them. "
    "No teacher exceeds the limit on average. What it knows in the last quarter alone, it knows of the answer only. On wrong "
    "responses the mean is the lower, the better the reference tells them from right ones."
)
_LEGEND = (
    "The thin line of a bar is its 95 % interval. The mark across a column is the row 'oracle': what the truth from one "
    "half of the continuations reaches against that from the other, as far as any credit can be seen to agree with it."
)


def _notes(counts: Fields) -> list[str]:
    share = counts["decisive_tokens"] / counts["tokens"]
    return [
        f"{counts['responses']} responses to {counts['problems']} problems, {counts['tokens']:,} tokens, of which "
        f"{share:.1%} are decisive (|A*| > 0.25).",
        f"{counts['continuations']:,} continuations of {counts['prefixes']:,} prefixes with {counts['tokens_sampled']:,} "
        f"sampled tokens; {counts['share_right']:.3f} of all responses are right.",
    ]
