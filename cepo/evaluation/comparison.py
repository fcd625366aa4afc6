"""Compares evaluations problem by problem, and puts them beside published figures in a table of the paper's form."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.benchmark_names import TITLES
from cepo.evaluation.results import RESULTS_FILE, read_results, read_rows
from cepo.evaluation.statistics import Estimate, Row, clustered_mean, macro_average
from cepo.files.safe_files import damaged_as, read_json
from cepo.files.trees import Fields
from cepo.report.comparison_sentence import sentence_of_two
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow

_AVERAGE = "Average"
_OLD_DIFFERENCE = "difference"
"""A column of tables that version 0.4 wrote."""
_Problem = tuple[str, str, str]
"""A problem's identifier, its right answer, and its cluster."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The accuracies of two models on the same problems of a benchmark; `difference` is second minus first."""

    benchmark: str
    num_problems: int
    first: float
    second: float
    difference: Estimate


def compare_evaluations(first: Path, second: Path) -> list[Paired]:
    """Returns the paired difference of accuracies per benchmark, in whose error shared effects cancel (hard problems).

    Raises `DataError` if a folder has no evaluation, or the two have no benchmark in common or different problems.
    """
    rows_of_first = read_rows(first)
    rows_of_second = read_rows(second)
    common_benchmarks = [benchmark for benchmark in rows_of_first if benchmark in rows_of_second]
    if not common_benchmarks:
        raise DataError(
            f"{first} has {', '.join(rows_of_first)} and {second} has {', '.join(rows_of_second)}: nothing to compare"
        )
    return [_paired(name, rows_of_first[name], rows_of_second[name]) for name in common_benchmarks]


def _paired(benchmark: str, rows_of_first: Sequence[Row], rows_of_second: Sequence[Row]) -> Paired:
    first = _accuracies(rows_of_first)
    second = _accuracies(rows_of_second)
    if first.keys() != second.keys():
        raise DataError(
            f"{benchmark}: the two evaluations used different problems ({len(first)} and {len(second)}); "
            "evaluate both with the same data=, data.max_prompt_length and pixel limits"
        )
    differences: list[float] = []
    clusters: list[str] = []
    for problem, accuracy_of_first in first.items():
        _, _, cluster = problem
        differences.append(second[problem] - accuracy_of_first)
        clusters.append(cluster)
    return Paired(
        benchmark=benchmark,
        num_problems=len(first),
        first=statistics.fmean(first.values()),
        second=statistics.fmean(second.values()),
        difference=clustered_mean(differences, clusters),
    )


def _accuracies(rows: Sequence[Row]) -> dict[_Problem, float]:
    """Returns the share of right responses of each problem."""
    verdicts: dict[_Problem, list[bool]] = defaultdict(list)
    for row in rows:
        verdicts[row["problem_id"], row["ground_truth"], row["cluster"]].append(row["correct"])
    return {
        problem: sum(verdicts_of_problem) / len(verdicts_of_problem)
        for problem, verdicts_of_problem in verdicts.items()
    }


def is_scored(name: str) -> bool:
    """Returns whether a name is an evaluation's folder or a JSON table; otherwise it is a run."""
    return name.endswith(".json") or (Path(name) / RESULTS_FILE).is_file()


def score_table(names: Sequence[str]) -> ScoreTable:
    """Returns a table of evaluations and published tables in the given order, with averages computed from their cells.

    Each evaluation after the first is followed by its differences from the first, paired by problem. Raises `DataError` if
    a name is neither an evaluation nor a table.
    """
    rows: list[TableRow] = []
    notes: Sequence[str] = ()
    headlines: list[str] = []
    first: Path | None = None
    for name in names:
        if name.endswith(".json"):
            rows += map(averaged, _published(Path(name)))
            continue
        row = averaged(_evaluated(Path(name)))
        rows.append(row)
        if first is None:
            first = Path(name)
            continue
        pairs = compare_evaluations(first, Path(name))
        rows.append(TableRow(group=row.group, name=f"{row.name} less {first.name}", cells=_differences(pairs)))
        headlines.append(headline_of_pairs(first.name, row.name, pairs))
        notes = ["Differences are in points, paired by problem."]
    columns = [Column(name=name, is_ranked=True) for name in (*_benchmarks_in(rows), _AVERAGE)]
    title = "Accuracy in %, ± standard error; the average is the unweighted mean"
    return ScoreTable(title=title, columns=columns, rows=rows, notes=notes, headline=" ".join(headlines))


def _average_gain(pairs: Sequence[Paired]) -> Cell:
    """Returns the mean over benchmarks of the paired differences, in percentage points."""
    return _cell(macro_average([paired.difference for paired in pairs]), 100.0)


def _differences(pairs: Sequence[Paired]) -> dict[str, Cell | str]:
    """Returns the differences by benchmark and on average as texts, which are no accuracies for who reads the table again."""
    cells = {TITLES.get(paired.benchmark, paired.benchmark): _cell(paired.difference, 100.0) for paired in pairs}
    cells[_AVERAGE] = _average_gain(pairs)
    return {name: cell.text(2, signed=True) for name, cell in cells.items()}


def headline_of_pairs(first: str, second: str, pairs: Sequence[Paired]) -> str:
    """Returns the result of two evaluations in one sentence, with the normal 95 % interval of the paired difference."""
    mean_of_first = 100 * statistics.fmean(paired.first for paired in pairs)
    mean_of_second = 100 * statistics.fmean(paired.second for paired in pairs)
    what = f"the average of {len(pairs)} benchmarks"
    if len(pairs) == 1:
        what = TITLES.get(pairs[0].benchmark, pairs[0].benchmark)
    means = f"{mean_of_second:.1f} % against {mean_of_first:.1f} % on {what}"
    return sentence_of_two(first, second, means, _average_gain(pairs).with_interval())


def _benchmarks_in(rows: Sequence[TableRow]) -> list[str]:
    """Returns the benchmarks of which a row has a figure: known ones in their order, then others as they occur."""
    names: dict[str, None] = {}  # in the order in which they occur
    for row in rows:
        names.update(dict.fromkeys(name for name in row.cells if name != _AVERAGE))
    known = [title for title in TITLES.values() if title in names]
    return list(dict.fromkeys([*known, *names]))


def _published(path: Path) -> Iterator[TableRow]:
    """Yields the rows of a table from `ScoreTable.as_json`, or of one in the same format."""
    with damaged_as(path, "holds no table of `cepo compare --out FILE.json`"):
        for row in read_json(path, dict)["rows"]:
            group = str(row.pop("group"))
            name = str(row.pop("name"))
            cells: dict[str, Cell] = {}
            for column, entry in row.items():
                if isinstance(entry, Mapping) and column != _OLD_DIFFERENCE:
                    cells[column] = _cell(entry, 1.0)
            is_of_differences = row and not cells  # which are texts
            if not is_of_differences:
                yield TableRow(group=group, name=name, cells=cells)


def _evaluated(folder: Path) -> TableRow:
    results = read_results(folder)
    with damaged_as(folder / RESULTS_FILE, "holds no result of cepo evaluate; evaluate the model again"):
        cells: dict[str, Cell] = {}
        for name, figures in results["benchmarks"].items():
            title = TITLES.get(str(name), str(name))
            cells[title] = _cell(figures["accuracy"], 100.0)
        return TableRow(group=str(results["model"]), name=folder.resolve().name, cells=cells)


def averaged(row: TableRow) -> TableRow:
    """Returns a row with the `macro_average` of its benchmarks' cells; raises `DataError` if it has none."""
    cells = {name: cell for name, cell in row.cells.items() if isinstance(cell, Cell) and name != _AVERAGE}
    if not cells:
        raise DataError(f"{row.group}, {row.name}: there is no benchmark to average; evaluate the model again")
    mean = macro_average([vars(cell) for cell in cells.values()])
    return replace(row, cells={**cells, _AVERAGE: _cell(mean, 1.0)})


def _cell(estimate: Fields, scale: float) -> Cell:
    mean = None if estimate["mean"] is None else float(estimate["mean"])
    error = None if estimate["error"] is None else float(estimate["error"])
    is_plausible = mean is not None and abs(mean) <= 100 and 0 <= (error or 0) <= 100  # false for NaN
    if mean is None or not is_plausible:
        raise ValueError("neither a fraction nor a percentage")
    return Cell(mean=scale * mean, error=None if error is None else scale * error)
