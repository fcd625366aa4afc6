"""Formats the results of a measurement as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CREDIT = {
    "pearson": "Pearson",
    "pearson_corrected": "corrected",
    "spearman": "Spearman",
    "spearman_corrected": "corrected",
    "auroc": "AUROC",
    "top_hit": "top-1 hit",
    "share_on_decisive": "share on decisive",
    "sign_agreement": "sign agreement",
}
_VALUE = {"pearson": "Pearson", "pearson_corrected": "corrected", "calibration_error": "calibration error"}


def credit_markdown(results: Mapping[str, Any]) -> str:
    """Returns the tables of credits and values, each figure with its standard error over problems."""
    counts = results["counts"]
    share = counts["decisive_tokens"] / counts["tokens"]
    lines = [
        f"{counts['responses']} responses to {counts['problems']} problems, {counts['tokens']:,} tokens, of which "
        f"{share:.1%} are decisive (|A*| > 0.25);",
        f"{counts['continuations']:,} continuations of {counts['prefixes']:,} prefixes with {counts['tokens_sampled']:,} "
        f"sampled tokens; {counts['share_right']:.3f} of all responses are right.",
        "",
        *_table("credit of a token, against A*", _CREDIT, results["credit"]),
        "",
        *_table("value of a prefix, against V", _VALUE, results["value"]),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(columns.values())} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {row['name']} | {' | '.join(figure_text(row[name]) for name in columns)} |"


def figure_text(figure: Mapping[str, float | None]) -> str:
    """Returns a figure with its error, such as `0.152 ± 0.021`; a dash if it is undefined."""
    value, error = figure["value"], figure["error"]
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"
