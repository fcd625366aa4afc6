"""Puts evaluations beside published figures in a table of the paper's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.comparison import compare_evaluations
from cepo.evaluation.named_sources import TITLES
from cepo.evaluation.results import RESULTS_FILE, results_file
from cepo.evaluation.statistics import macro_average
from cepo.files.foreign import damaged_as, read_json
from cepo.files.trees import Fields, Tree
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow

_AVERAGE, _DIFFERENCE = "Average", "difference"


def is_scored(name: str) -> bool:
    """Returns whether a name is an evaluation's folder or a JSON table; otherwise it is a run."""
    return name.endswith(".json") or (Path(name) / RESULTS_FILE).is_file()


def score_table(names: Sequence[str]) -> ScoreTable:
    """Returns a table of evaluations and published tables in the given order, with averages computed from their cells.

    Each evaluation after the first also has its difference from the first, paired by problem. Raises `DataError` if a
    name is neither an evaluation nor a table.
    """
    rows: list[TableRow] = []
    notes: list[str] = []
    first: Path | None = None
    for name in names:
        if name.endswith(".json"):
            rows += map(_averaged, _published(Path(name)))
            continue
        row = _averaged(_evaluated(Path(name)))
        if first is not None:
            average_gain = macro_average([each.difference for each in compare_evaluations(first, Path(name))])
            row = replace(row, cells={**row.cells, _DIFFERENCE: _cell(average_gain, 100.0)})
        first = first or Path(name)
        rows.append(row)
    known = [*TITLES.values(), *(name for row in rows for name in row.cells if name not in (_AVERAGE, _DIFFERENCE))]
    benchmarks = [name for name in dict.fromkeys(known) if any(name in row.cells for row in rows)]
    columns = [Column(name=name, is_ranked=True) for name in (*benchmarks, _AVERAGE)]
    if first is not None and any(_DIFFERENCE in row.cells for row in rows):
        columns.append(Column(name=_DIFFERENCE, signed=True))
        notes.append(f"The difference of averages is from {first.name}, paired by problem.")
    title = "Accuracy in %, ± standard error; the average is the unweighted mean"
    return ScoreTable(title=title, columns=columns, rows=rows, notes=notes)


def _published(path: Path) -> Iterator[TableRow]:
    """Yields the rows of a table from `ScoreTable.as_json`, or of one in the same format."""
    with damaged_as(path, "holds no table of `cepo compare --out FILE.json`"):
        for row in read_json(path, dict)["rows"]:
            cells = {name: cell for name, cell in row.items() if isinstance(cell, Mapping) and name != _DIFFERENCE}
            values = {name: _cell(cell, 1.0) for name, cell in cells.items()}
            yield TableRow(group=str(row["group"]), name=str(row["name"]), cells=values)


def _evaluated(folder: Path) -> TableRow:
    path = results_file(folder)
    with damaged_as(path, "holds no result of cepo evaluate; evaluate the model again"):
        results: Tree = read_json(path, dict, within=folder)
        cells = {
            TITLES.get(str(name), str(name)): _cell(figures["accuracy"], 100.0)
            for name, figures in results["benchmarks"].items()
        }
        return TableRow(group=str(results["model"]), name=folder.resolve().name, cells=cells)


def _averaged(row: TableRow) -> TableRow:
    return replace(row, cells={**_benchmarks(row), _AVERAGE: average(row)})


def average(row: TableRow) -> Cell:
    """Returns the `macro_average` of the benchmarks' cells; raises `DataError` if the row has none."""
    cells = list(_benchmarks(row).values())
    if not cells:
        raise DataError(f"{row.group}, {row.name}: there is no benchmark to average; evaluate the model again")
    return _cell(macro_average([vars(cell) for cell in cells]), 1.0)


def _benchmarks(row: TableRow) -> dict[str, Cell]:
    return {name: cell for name, cell in row.cells.items() if isinstance(cell, Cell) and name != _AVERAGE}


def _cell(estimate: Fields, scale: float) -> Cell:
    mean, error = (None if value is None else float(value) for value in (estimate["mean"], estimate["error"]))
    if mean is None or not abs(mean) <= 100 or not 0 <= (error or 0) <= 100:
        raise ValueError("neither a fraction nor a percentage")
    return Cell(mean=scale * mean, error=None if error is None else scale * error)
