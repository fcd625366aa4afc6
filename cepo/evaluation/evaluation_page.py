"""Shows evaluations: rows of their figures for a terminal, and a page with the responses of one or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.comparison import compare_evaluations
from cepo.evaluation.results import RESULTS_FILE, read_results, read_rows
from cepo.evaluation.statistics import Row
from cepo.files.safe_files import damaged_as
from cepo.files.trees import Fields
from cepo.report.html_page import Result, Section, Table, write_page
from cepo.report.samples import Sample, samples_table
from cepo.report.score_tables import Cell

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

    Below a benchmark are its accuracies by kind of answer if there are several, its accuracies by category, and the numbers
    of ungraded problems. Categories with many values are given only if `is_whole`.
    """
    num_samples = results["sampling"]["num_samples"]
    head = ["", "problems", "accuracy", "tokens", "cut off", "no answer"]
    if num_samples > 1:
        head.insert(3, f"pass@{num_samples}")
    yield head
    empty_cells = [""] * (len(head) - 3)
    for name, figures in results["benchmarks"].items():
        row = [
            name,
            str(figures["num_problems"]),
            percent(figures["accuracy"]),
            f"{figures['response_length']['mean']:.0f}",
            f"{100 * figures['share_cut_off']:.1f}",
            f"{100 * figures['share_without_answer']:.1f}",
        ]
        if num_samples > 1:
            row.insert(3, percent(figures["pass_at_k"][str(num_samples)]))
        yield row
        for label, count, estimate in _further_figures(figures, is_whole=is_whole):
            yield [f"  {label}", count, estimate, *empty_cells]
    if "average" in results:
        yield ["average", "", percent(results["average"]), *empty_cells]


def _further_figures(figures: Fields, *, is_whole: bool) -> Iterator[tuple[str, str, str]]:
    """Yields a label, a number of problems or groups, and a figure for each row below a benchmark's."""
    kinds = figures["by_kind"]
    if len(kinds) > 1:
        for kind, estimate in kinds.items():
            yield kind, str(estimate["num_problems"]), percent(estimate)
    if "worst_variant" in figures:
        yield "worst variant", str(figures["worst_variant"]["num_clusters"]), percent(figures["worst_variant"])
    for category, values in figures.get("by_category", {}).items():
        if is_whole or 1 < len(values) <= _MOST_VALUES:
            for value, estimate in values.items():
                yield f"{category}: {value}", str(estimate["num_problems"]), percent(estimate)
    for name, label in _UNGRADED.items():
        number = figures.get(name, 0)
        if number:
            yield label, str(number), ""


def percent(estimate: Fields, *, signed: bool = False) -> str:
    """Formats an estimate in percent, such as `43.4 ± 1.2`, without the error if there is none."""
    return Cell(mean=estimate["mean"], error=estimate["error"]).percent.text(signed=signed)


def write_evaluations(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page of one evaluation, or of two, with the responses whose verdict changed first; returns its path.

    Raises `DataError` if there are more than two folders, one has no finished evaluation, or their problems differ.
    """
    if len(folders) not in (1, 2):
        raise DataError(f"{len(folders)} evaluations: a page shows one or two; give --out a table (.md .tex .json)")
    rows_by_benchmark = [read_rows(folder) for folder in folders]
    labels = _labels(folders)
    results = [read_results(folder) for folder in folders]
    with damaged_as(folders[-1] / RESULTS_FILE, "holds no result of cepo evaluate; evaluate the model again"):
        tables = [_figures_table(label, figures) for label, figures in zip(labels, results, strict=True)]
        subtitles = [_subtitle(figures) for figures in results]
        lines = list(_results(results[0])) if len(folders) == 1 else list(_changes(*folders))
    sections = [Section(title="Figures", tables=tables, closed=False)]
    first_rows = rows_by_benchmark[0]
    last_rows = rows_by_benchmark[-1]  # those of the first for a single evaluation
    common_benchmarks = [name for name in first_rows if name in last_rows]
    for name in common_benchmarks:
        samples: dict[str, Iterator[Sample]] = {}
        for label, rows in zip(labels, rows_by_benchmark, strict=True):
            samples[label if len(folders) > 1 else ""] = _samples(rows[name])
        table = samples_table(samples)
        sections.append(Section(title=f"Responses: {name}", closed=name != common_benchmarks[0], tables=[table]))
    return write_page(
        out,
        title=f"Evaluation of {_model(results[0]) if len(folders) == 1 else ' → '.join(labels)}",
        subtitle=" against ".join(subtitles),
        results=lines,
        sections=sections,
    )


def _labels(folders: Sequence[Path]) -> list[str]:
    """Returns the names of the folders, numbered if they are equal."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _figures_table(label: str, results: Fields) -> Table:
    head, *rows = figure_rows(results, is_whole=True)
    head[0] = "benchmark"
    caption = f"{label}: accuracy in %, ± standard error"
    return Table(head=head, rows=rows, caption=caption, is_of_cards=True)


def _model(results: Fields) -> str:
    return "/".join(Path(str(results["checkpoint"] or results["model"])).parts[-2:])


def _subtitle(results: Fields) -> str:
    """Returns one line on how an evaluation was made: model, samples per problem, temperature, engine."""
    sampling = results["sampling"]
    return (
        f"{_model(results)} · {sampling['num_samples']} per problem at temperature {sampling['temperature']:g} · "
        f"{results['generator']}"
    )


def _results(results: Fields) -> Iterator[Result]:
    for name, figures in results["benchmarks"].items():
        counts = f"{figures['num_responses']:,} responses to {figures['num_problems']:,} problems"
        yield Result(value=f"{percent(figures['accuracy'])} %", name=f"of {name} is right", details=counts)


def _changes(first: Path, second: Path) -> Iterator[Result]:
    for paired in compare_evaluations(first, second):
        yield Result(
            value=f"{percent(paired.difference, signed=True)} points",
            name=f"on {paired.benchmark}",
            change=f"from {100 * paired.first:.1f} % to {100 * paired.second:.1f} %",
            details=f"paired over {paired.num_problems:,} problems",
        )


def _samples(rows: Sequence[Row]) -> Iterator[Sample]:
    """Yields an evaluation's responses."""
    for row in rows:
        problem = row["problem_id"]
        text = row.get("problem", f"problem {problem}")
        yield Sample(
            problem=problem,
            is_right=row["correct"],
            row={**row, "problem": text},
            found=str(row["answer"] or "none") if "answer" in row else None,
            category=", ".join(str(value) for value in row.get("categories", {}).values()),
        )
