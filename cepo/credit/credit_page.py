"""Presents a measurement of credit: the answer in one sentence, tables, and a page with responses and their true credit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cepo.credit.agreement import QUARTERS
from cepo.credit.measurement import TRACES_FILE
from cepo.credit.truth import read_whole
from cepo.files.safe_files import LARGEST_IMAGE, read_bytes, read_objects
from cepo.files.trees import Fields, Tree
from cepo.report.html_page import Dot, DotPlot, Section, table_of_scores, write_page
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow
from cepo.report.shown_responses import (
    ColouredRow,
    ColouredToken,
    CreditedResponse,
    coloured,
    data_uri,
    response_title,
    shown_problem,
    unmeasured,
    visible,
)

PAGE_FILE = "credit.html"
_UNIFORM = "uniform"
_MOST_RESPONSES = 12
_LEAST_PROBLEMS = 10
"""Of fewer problems no method is ranked: standard errors over problems say little."""
_LEAST_FULL_COLOUR = 0.25
"""Of the true credit, full colour is the response's largest |A*|, but at least this."""
_CREDIT = {
    "pearson": "Pearson",
    "pearson_corrected": "Pearson corrected",
    "auroc": "AUROC",
    "share_on_decisive": "share on decisive",
}
_VALUE = {"pearson": "Pearson", "pearson_corrected": "Pearson corrected"}
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


def credit_headline(results: Fields) -> str:
    """Returns the result in one sentence: the best method beside uniform credit, with errors, and what is possible."""
    if "credit" not in results:
        return _headline_of_knowledge(results["knowledge"])
    num_problems = results["counts"]["problems"]
    if num_problems < _LEAST_PROBLEMS:
        return (
            f"{num_problems} problem{'s' if num_problems > 1 else ''} cannot rank methods: errors over so few say little. "
            f"Measure at least {_LEAST_PROBLEMS} (data.rollout_batch_size) and more responses (--responses)."
        )
    rows = _ranked(results["credit"])
    uniform = next((row for row in rows if _UNIFORM in row["names"]), None)
    methods = [row for row in rows if row["kind"] == "method" and row is not uniform]
    if uniform is None or not methods:
        return "No method's agreement with the truth is defined: its credit, or the truth, is constant."
    best = methods[0]
    r_of_best = _with_error(best["pearson"])
    r_of_uniform = _with_error(uniform["pearson"])
    sentence = (
        f"The credit of {best['name']} correlates with the true credit by r = {r_of_best}, "
        f"uniform credit by {r_of_uniform}"
    )
    better_baselines: list[Fields] = []
    for row in rows:
        if row["kind"] == "baseline" and row["pearson"]["value"] > best["pearson"]["value"]:
            better_baselines.append(row)
    if better_baselines:
        baseline = better_baselines[0]
        r_of_baseline = _with_error(baseline["pearson"])
        sentence += f", and {baseline['name']}, a baseline, by {r_of_baseline}"
    ceiling = results["ceiling"]["value"]
    if ceiling is not None:
        sentence += f"; perfect credit would reach {ceiling:.2f}"
    return sentence + "."


def _headline_of_knowledge(rows: Sequence[Fields]) -> str:
    if not rows:
        return "No teacher read a reference of a right response, so there is nothing to compare."
    best = max(rows, key=lambda row: row["nats"]["value"])
    limit = best["limit"]["value"]
    nats = _with_error(best["nats"])
    return (
        f"The teacher {best['name']} raises the log-probability of right responses by {nats} nats; "
        f"no teacher can exceed {limit:.2f} on average."
    )


def _ranked(rows: Sequence[Fields]) -> list[Tree]:
    """Returns the rows with a correlation, the highest first, without controls; rows with equal figures become one.

    A row has the `names` of all that it stands for.
    """
    distinct: dict[str, Tree] = {}
    for row in rows:
        if row["kind"] == "control" or row["pearson"]["value"] is None:
            continue
        earlier = distinct.setdefault(_fingerprint(row), {**row, "names": []})
        earlier["names"].append(row["name"])
        earlier["name"] = " = ".join(earlier["names"])
    return sorted(distinct.values(), key=lambda row: -row["pearson"]["value"])


def _fingerprint(row: Fields) -> str:
    """Returns the figures of a row up to rounding, by which rows are equal."""
    numbers: list[str] = []
    for figure in row.values():
        if isinstance(figure, Mapping):
            for number in figure.values():
                numbers.append("undefined" if number is None else f"{number:.8g}")
    return " ".join(numbers)


def _with_error(figure: Fields) -> str:
    return Cell(mean=figure["value"], error=figure["error"]).text(2)


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


def write_credit_page(results: Fields, out: Path) -> Path:
    """Writes the page of a measurement, with the responses that were written beside it; returns its path.

    Raises `DataError` if those cannot be read.
    """
    description = results["description"]
    tables = {table.title: table for table in credit_tables(results, with_kinds=True)}
    knowledge, *further_tables = [table_of_scores(table, first="method") for table in tables.values()]
    sections: list[Section] = []
    if "credit" in results:
        credit, value, *contrast = further_tables
        sections.append(
            Section(
                title="Agreement with the truth",
                notes=notes_on_work(results["counts"]),
                dots=_dots_of_credit(results),
                closed=False,
            )
        )
        sections += _sections_of_responses(out.parent)
        sections += [
            Section(title="All figures of credit", notes=[_ORACLE_NOTE], tables=[credit]),
            Section(title="Value of a prefix", tables=[value]),
        ]
        if contrast:
            sections.append(Section(title="Evidence and its noise", notes=[_CONTRAST_NOTE], tables=contrast))
    if results["knowledge"]:
        sections.append(
            Section(
                title="What teachers know",
                notes=[_KNOWING],
                dots=_dots_of_knowledge(results["knowledge"]),
                tables=[knowledge],
                closed="credit" in results,
            )
        )
    model = "/".join(Path(str(description["checkpoint"] or description["model"])).parts[-2:])
    return write_page(
        out,
        title="Credit of methods" if "credit" in results else "What teachers know",
        subtitle=f"{model} · {description['generator']}",
        headline=credit_headline(results),
        sections=sections,
    )


def _dots_of_credit(results: Fields) -> DotPlot:
    """Returns the correlations with A*, the highest first."""
    ceiling = results["ceiling"]["value"]
    return _dot_plot(
        _ranked(results["credit"]),
        "pearson",
        title="Correlation of a token's credit with its true credit A*",
        note="Pearson's r ± standard error over problems: methods in bold and violet, evidence dark, baselines grey",
        ceiling=ceiling,
        ceiling_text="" if ceiling is None else f"perfect credit: {ceiling:.2f}",
    )


def _dots_of_knowledge(rows: Sequence[Fields]) -> DotPlot:
    """Returns what teachers know of right responses, the most first; the ceiling is the highest of their limits."""
    ceiling = max(row["limit"]["value"] for row in rows)
    methods = [{**row, "kind": "method"} for row in rows]
    ranked = sorted(methods, key=lambda row: -row["nats"]["value"])
    return _dot_plot(
        ranked,
        "nats",
        title="What teachers know of right responses",
        note="nats per response, ± standard error over problems",
        ceiling=ceiling,
        ceiling_text=f"limit, -log p: {ceiling:.2f}",
    )


def _dot_plot(
    rows: Sequence[Fields], measure: str, *, title: str, note: str, ceiling: float | None, ceiling_text: str
) -> DotPlot:
    """Returns rows as dots in their order, on a scale that has 0, the ceiling, and all intervals."""
    ends = [0.0]
    if ceiling is not None:
        ends.append(ceiling)
    for row in rows:
        value, error = row[measure]["value"], row[measure]["error"] or 0.0
        ends += [value - error, value + error]
    least = min(ends)
    size = (max(ends) - least) or 1.0

    def place(number: float) -> float:
        return round(100 * (number - least) / size, 2)

    dots: list[Dot] = []
    for row in rows:
        value, error = row[measure]["value"], row[measure]["error"]
        dots.append(
            Dot(
                name=row["name"],
                kind=row["kind"],
                place=place(value),
                low=None if error is None else place(value - error),
                high=None if error is None else place(value + error),
                text=_with_error(row[measure]),
            )
        )
    return DotPlot(
        title=title,
        note=note,
        dots=dots,
        zero=place(0.0),
        ends=(f"{least:.2f}", f"{least + size:.2f}"),
        ceiling=None if ceiling is None else place(ceiling),
        ceiling_text=ceiling_text,
    )


def _sections_of_responses(folder: Path) -> Iterator[Section]:
    """Yields the clearest right and wrong response to one problem with their true credit, and further ones folded."""
    path = folder / TRACES_FILE
    if not path.is_file():
        return
    with read_whole(path):
        traces = list(read_objects(path, within=folder))
        traces.sort(key=_largest_credit, reverse=True)
        pair = _clearest_pair(traces)
        further_traces = [trace for trace in traces if trace not in pair][: _MOST_RESPONSES - len(pair)]
        pair_responses = [_credited(trace, folder) for trace in pair]
        folded = [_credited(trace, folder) for trace in further_traces]
    yield Section(title="True credit beside each method", notes=[_COLOURS], responses=pair_responses, closed=False)
    if folded:
        yield Section(title="More responses", responses=folded)


def _largest_credit(trace: Fields) -> float:
    return max((abs(value) for value in trace["credit"] if value is not None), default=0.0)


def _clearest_pair(traces: Sequence[Fields]) -> list[Fields]:
    """Returns of the first problem that has both a right and a wrong response, or else of the first alone.

    `traces` are in the order of their largest credit.
    """
    for trace in traces:
        for counterpart in traces:
            if counterpart["prompt_id"] == trace["prompt_id"] and counterpart["correct"] != trace["correct"]:
                return [trace, counterpart] if trace["correct"] else [counterpart, trace]
    return list(traces[:1])


def _credited(trace: Fields, folder: Path) -> CreditedResponse:
    image: str | None = None
    if trace["image"]:
        image = data_uri(read_bytes(folder / trace["image"], within=folder, largest=LARGEST_IMAGE))
    return CreditedResponse(
        title=response_title(trace["correct"], trace["reward"]),
        problem=shown_problem(trace["problem"]),
        ground_truth=visible(trace["ground_truth"]),
        image=image,
        rows=list(_rows_of(trace)),
    )


def _rows_of(trace: Fields) -> Iterator[ColouredRow]:
    """Yields the true credit, then that of each method; methods with the same colours share a row."""
    tokens = trace["tokens"]
    full = max(_largest_credit(trace), _LEAST_FULL_COLOUR)
    yield ColouredRow(label="true credit A*", tokens=_coloured(tokens, trace["credit"], full, "A*"))
    rows_by_colour: dict[tuple[int, ...], ColouredRow] = {}
    for method, advantages in trace["advantages"].items():
        mean_size = statistics.fmean(abs(advantage) for advantage in advantages)
        coloured_tokens = _coloured(tokens, advantages, 2 * mean_size or 1.0, "advantage")
        colours = tuple(token.percent for token in coloured_tokens)
        label = method
        if colours in rows_by_colour:
            label = f"{rows_by_colour[colours].label} = {method}"
        rows_by_colour[colours] = ColouredRow(label=label, tokens=coloured_tokens)
    yield from rows_by_colour.values()


def _coloured(tokens: Sequence[str], values: Sequence[float | None], full: float, name: str) -> list[ColouredToken]:
    coloured_tokens: list[ColouredToken] = []
    for text, value in zip(tokens, values, strict=True):
        if value is None:
            coloured_tokens.append(unmeasured(text))
        else:
            coloured_tokens.append(coloured(text, value / full, f"{name} {value:+.3f}"))
    return coloured_tokens


_KNOWING = (
    "The mean log-probability ratio of teacher to student on right responses: how far the reference announces them. "
    "No teacher exceeds the limit on average. If it only helps in the last quarter, the teacher knows the answer but not "
    "the derivation. On wrong responses the mean is the lower, the better the reference tells them from right ones."
)
_CONTRAST_NOTE = (
    "|delta| of the decisive tokens over the standard deviation of delta on the others that had an alternative. Below 1, "
    "most of what evidence changes is noise."
)
_ORACLE_NOTE = (
    "The row 'oracle' compares the truth from one half of the continuations with that from the other half: what perfect "
    "credit with half as many continuations would reach. Permuted and inverted credits are controls."
)
_COLOURS = (
    "Blue is credit, orange blame. Full colour is, of the truth, the response's largest |A*|, and of a method twice its "
    "mean |advantage| there. Hatched tokens were not measured."
)
