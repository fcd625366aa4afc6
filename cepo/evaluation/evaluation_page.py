"""Shows evaluations: rows of their figures for a terminal, and a page with the responses of one or two."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from cepo.errors import DataError
from cepo.evaluation.comparison import Paired, compare_evaluations
from cepo.evaluation.results import RESULTS_FILE, read_rows
from cepo.evaluation.statistics import Row, macro_average
from cepo.files.foreign import damaged_as, read_json
from cepo.files.trees import Fields
from cepo.report.drawing import Sample, Section, Table, samples_table, write_page

_MOST_VALUES = 40
"""The largest number of values of a category that a terminal shows."""
_UNGRADED = {
    "num_left_out": "left out: bad or too long",
    "num_without_judge": "left out: need a judge",
    "num_without_verdict": "left out: no verdict of the judge",
}
"""Numbers in evaluation.json, with their labels in tables."""


def figure_rows(results: Fields, *, is_whole: bool = False) -> Iterator[list[str]]:
    """Yields a head, and rows of accuracies in percent with errors.

    Below a benchmark are its accuracies by kind of answer if there are several, its own scores, its accuracies by
    category, and the numbers of ungraded problems. Categories with many values are given only if `is_whole`.
    """
    num_samples = results["sampling"]["num_samples"]
    largest = [f"pass@{num_samples}"] if num_samples > 1 else []
    yield ["", "problems", "accuracy", *largest, "tokens", "cut off", "no answer"]
    rest = [""] * (len(largest) + 3)
    for name, figures in results["benchmarks"].items():
        yield [
            name,
            str(figures["num_problems"]),
            percent(figures["accuracy"]),
            *(percent(figures["pass_at_k"][str(num_samples)]) for _ in largest),
            f"{figures['response_length']['mean']:.0f}",
            f"{100 * figures['share_cut_off']:.1f}",
            f"{100 * figures['share_without_answer']:.1f}",
        ]
        for label, count, estimate in _further_figures(figures, is_whole=is_whole):
            yield [f"  {label}", count, estimate, *rest]
    if "average" in results:
        yield ["average", "", percent(results["average"]), *rest]


def _further_figures(figures: Fields, *, is_whole: bool) -> Iterator[tuple[str, str, str]]:
    """Yields a label, a number of problems or groups, and a figure for each row below a benchmark's."""
    kinds = figures["by_kind"]
    if len(kinds) > 1:
        for kind, estimate in kinds.items():
            yield kind, str(estimate["num_problems"]), percent(estimate)
    if "worst_variant" in figures:
        yield "worst variant", str(figures["worst_variant"]["num_clusters"]), percent(figures["worst_variant"])
    for name, score in figures.get("scores", {}).items():
        label = name.removeprefix("num_").replace("_", " ")
        if isinstance(score, Mapping):
            yield label, "", percent(cast("Fields", score))
        elif score:  # a number of groups
            yield label, str(score), ""
    for category, values in figures.get("by_category", {}).items():
        if is_whole or 1 < len(values) <= _MOST_VALUES:
            for value, estimate in values.items():
                yield f"{category}: {value}", str(estimate["num_problems"]), percent(estimate)
    for name, label in _UNGRADED.items():
        if number := figures.get(name, 0):
            yield label, str(number), ""


def percent(estimate: Fields, *, sign: str = "") -> str:
    """Formats an estimate in percent, such as `43.4 ± 1.2`, without the error if there is none."""
    shown = f"{100 * estimate['mean']:{sign}.1f}"
    return shown if estimate["error"] is None else f"{shown} ± {100 * estimate['error']:.1f}"


def comparison_rows(comparisons: Sequence[Paired]) -> Iterator[list[str]]:
    """Yields a head, and rows of accuracies in percent with their paired differences in points."""
    yield ["", "problems", "first", "second", "difference"]
    rows: list[tuple[str, str, float, float, Fields]] = [
        (each.benchmark, str(each.num_problems), each.first, each.second, each.difference) for each in comparisons
    ]
    if len(comparisons) > 1:
        pairs = zip(*((each.first, each.second) for each in comparisons), strict=True)
        first, second = (statistics.fmean(values) for values in pairs)
        rows.append(("average", "", first, second, macro_average([each.difference for each in comparisons])))
    for name, count, before, after, difference in rows:
        yield [name, count, f"{100 * before:.1f}", f"{100 * after:.1f}", percent(difference, sign="+")]


def write_evaluations(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page of one evaluation, or of two, with the responses whose verdict changed first; returns its path.

    Raises `DataError` if there are more than two folders, one has no finished evaluation, or their problems differ.
    """
    if len(folders) not in (1, 2):
        raise DataError(f"{len(folders)} evaluations: a page shows one or two; give --out a table (.md .csv .json)")
    graded = [read_rows(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else [f"{name} ({k})" for k, name in enumerate(names, 1)]
    found = [read_json(folder / RESULTS_FILE, dict, within=folder) for folder in folders]
    with damaged_as(folders[-1] / RESULTS_FILE, "holds no result of cepo evaluate; evaluate the model again"):
        tables, subtitles = list[Table](), list[str]()
        for label, results in zip(labels, found, strict=True):
            head, *rows = figure_rows(results, is_whole=True)
            head[0] = "benchmark"
            tables.append(Table(head=head, rows=rows, caption=f"{label}: accuracy in %, ± standard error"))
            model = "/".join(Path(str(results["checkpoint"] or results["model"])).parts[-2:])
            count, temperature = results["sampling"]["num_samples"], results["sampling"]["temperature"]
            subtitles.append(f"{model} · {count} per problem at temperature {temperature:g} · {results['generator']}")
        lines = list(_changes(folders) if len(folders) == 2 else _results(found[0]))
    shared = [name for name in graded[0] if all(name in rows for rows in graded)]
    sections = [Section(title="Figures", tables=tables)]
    sections += [
        Section(
            title=f"Responses: {name}",
            closed=name != shared[0],
            tables=[
                samples_table({label: map(_sample, rows[name]) for label, rows in zip(labels, graded, strict=True)})
            ],
        )
        for name in shared
    ]
    return write_page(
        out, title=" → ".join(labels), subtitle=" against ".join(subtitles), results=lines, sections=sections
    )


def _results(results: Fields) -> Iterator[tuple[str, str, str]]:
    for name, figures in results["benchmarks"].items():
        counts = f"{figures['num_responses']:,} responses to {figures['num_problems']:,} problems"
        yield f"{percent(figures['accuracy'])} %", f"of {name} is right", counts


def _changes(folders: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    for each in compare_evaluations(folders[0], folders[1]):
        change = percent(each.difference, sign="+")
        accuracies = f"from {100 * each.first:.1f} % to {100 * each.second:.1f} %"
        yield f"{change} points", f"on {each.benchmark}", f"{accuracies}, paired over {each.num_problems:,} problems"


def _sample(row: Row) -> Sample:
    name = f"{row['problem_id']} {row.get('sample', 0)}"
    return name, row["correct"], {"problem": f"problem {row['problem_id']}", **row}
