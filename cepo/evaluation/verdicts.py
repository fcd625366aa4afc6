"""Writes the page of an evaluation, or of two evaluations of the same problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.results import RESULTS_FILE, Row, compare_evaluations, figure_rows, percent, read_rows
from cepo.foreign_files import damaged_as, read_json
from cepo.report.html import Sample, Section, Table, samples_table, write_page
from cepo.trees import Fields

PAGE_FILE = "evaluation.html"


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
        tables: list[Table] = []
        for label, results in zip(labels, found, strict=True):
            head, *rows = figure_rows(results)
            head[0] = "benchmark"
            tables.append(Table(head=head, rows=rows, caption=f"{label}: accuracy in %, ± standard error"))
        lines = list(_changes(folders) if len(folders) == 2 else _results(found[0]))
        subtitle = " against ".join(_subtitle(results) for results in found)
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
    return write_page(out, title=" → ".join(labels), subtitle=subtitle, results=lines, sections=sections)


def _results(results: Fields) -> Iterator[tuple[str, str, str]]:
    for name, figures in results["benchmarks"].items():
        counts = f"{figures['num_responses']:,} responses to {figures['num_problems']:,} problems"
        yield f"{percent(figures['accuracy'])} %", f"of {name} is right", counts


def _changes(folders: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    for each in compare_evaluations(folders[0], folders[1]):
        change = percent(each.difference, sign="+")
        accuracies = f"from {100 * each.first:.1f} % to {100 * each.second:.1f} %"
        yield f"{change} points", f"on {each.benchmark}", f"{accuracies}, paired over {each.num_problems:,} problems"


def _subtitle(results: Fields) -> str:
    sampling = results["sampling"]
    model = "/".join(Path(str(results["checkpoint"] or results["model"])).parts[-2:])
    count, temperature = sampling["num_samples"], sampling["temperature"]
    return f"{model} · {count} per problem at temperature {temperature:g} · {results['generator']}"


def _sample(row: Row) -> Sample:
    return (
        f"{row['problem_id']} {row.get('sample', 0)}",
        row["correct"],
        {"problem": f"problem {row['problem_id']}", **row},
    )
