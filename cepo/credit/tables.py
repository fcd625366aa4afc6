"""Shows the results of a measurement: tables in Markdown, and a picture of correlations and calibration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.report.charts import COLOURS

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


PICTURE = "credit.png"
_KINDS = {"method": COLOURS[0], "baseline": COLOURS[7], "evidence": COLOURS[2]}
_MARKS = "os^Dv"


def draw_credit(results: Mapping[str, Any], path: Path) -> None:
    """Draws the credits' Pearson correlations with their 95 % intervals, and the values' calibration curves."""
    from matplotlib.figure import Figure

    rows = [row for row in results["credit"] if row["pearson"]["low"] is not None]
    figure = Figure(figsize=(11.0, 1.2 + 0.24 * max(len(rows), 10)), dpi=110, layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, rows)
    curve.plot((0, 1), (0, 1), color=COLOURS[7], linestyle="dotted", label="calibrated")
    shown = [row for row in results["value"] if "calibration" in row]
    for row, colour, mark in zip(shown, itertools.cycle(COLOURS), itertools.cycle(_MARKS)):
        points = row["calibration"]
        believed, true = [point["believed"] for point in points], [point["true"] for point in points]
        curve.plot(believed, true, color=colour, marker=mark, markersize=4, linewidth=1.2, label=row["name"])
    curve.set(xlabel="believed chance of a right end", ylabel="V", xlim=(0, 1), ylim=(0, 1))
    curve.set_box_aspect(1)
    curve.set_title("Calibration of evidence", loc="left", fontsize=10)
    curve.legend(fontsize=7, frameon=False)
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    figures = [row["pearson"] for row in rows]
    spread = [
        [max(figure["value"] - figure["low"], 0.0) for figure in figures],
        [max(figure["high"] - figure["value"], 0.0) for figure in figures],
    ]
    axes.barh(
        range(len(rows)),
        [figure["value"] for figure in figures],
        xerr=spread,
        color=[_KINDS[row["kind"]] for row in rows],
        error_kw={"linewidth": 0.8, "capsize": 2},
    )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#000000", linewidth=0.6)
    axes.set_xlabel("Pearson correlation with A*, and its 95 % interval over problems", fontsize=8)
    axes.set_title("Credit (blue: methods, green: evidence, grey: baselines)", loc="left", fontsize=10)
