"""Computes the figures of graded responses, writes and shows them, and compares evaluations problem by problem.

Evaluations also stand beside published figures in a table of the paper's form. Standard errors are clustered by problem.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from cepo.errors import DataError
from cepo.foreign_files import damaged_as, read_json, read_objects
from cepo.report.drawing import Sample, Section, Table, samples_table, write_page
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow
from cepo.rewards.benchmark import KINDS
from cepo.tracking.run_folder import write_atomically
from cepo.trees import Fields, Tree

RESULTS_FILE = "evaluation.json"
GENERATIONS_FILE = "generations.jsonl"
PAGE_FILE = "evaluation.html"
_AVERAGE, _DIFFERENCE = "Average", "difference"
NAMES = {
    "dynamath": "DynaMath",
    "logicvista": "LogicVista",
    "mathvision": "MathVision",
    "mmmu": "MMMU",
    "wemath": "WeMath",
}
Row = Fields
"""One graded response of generations.jsonl; see `cepo.evaluation.run.graded_rows`."""


class Estimate(TypedDict):
    """A mean with its standard error over clusters, as in evaluation.json; the error is None for a single cluster."""

    mean: float
    error: float | None
    num_clusters: int


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Returns the mean of values that may be dependent within clusters, but not across them.

    For N values in C clusters, with residuals e_i = x_i - mean, `error^2 = C / (C - 1) * sum_c (sum_{i in c} e_i)^2 /
    N^2`. This is `sd(cluster means) / sqrt(C)` for clusters of equal size, and the ordinary `sd / sqrt(N)` for clusters
    of one value. Raises `DataError` if there are no values.
    """
    if not values:
        raise DataError("nothing was graded, so there is no mean")
    mean = statistics.fmean(values)
    residuals: dict[Hashable, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - mean
    scale = len(residuals) / len(values)
    spread = Cell.over([scale * residual for residual in residuals.values()])
    return Estimate(mean=mean, error=spread.error, num_clusters=len(residuals))


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Returns P(k of n responses, drawn without replacement, include a right one), `1 - C(n - c, k) / C(n, k)`."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def benchmark_figures(rows: Sequence[Row], *, has_variants: bool = False) -> Tree:
    """Returns the statistics of one benchmark's responses as plain values for JSON. Lengths are in tokens.

    `accuracy` is the mean over all responses (avg@n). `pass_at_k` needs several responses to a problem. `worst_variant`,
    the mean over questions of the lowest accuracy of any variant, is given if a cluster has the variants of one question.
    """
    lengths = [row["length"] for row in rows]
    problems: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        problems[row["problem_id"]].append(row)
    figures: Tree = {
        "num_problems": len(problems),
        "num_responses": len(rows),
        "num_right": sum(row["correct"] for row in rows),
        "accuracy": accuracy(rows),
        "by_kind": {
            kind: {"num_problems": len({row["problem_id"] for row in of_kind}), **accuracy(of_kind)}
            for kind in KINDS
            if (of_kind := [row for row in rows if row["kind"] == kind])
        },
        "response_length": {
            "mean": statistics.fmean(lengths),
            "median": statistics.median(lengths),
            "max": max(lengths),
        },
        "share_cut_off": statistics.fmean(not row["finished"] for row in rows),
        "share_without_answer": statistics.fmean(row["answer"] is None for row in rows),
    }
    clusters = [of_problem[0]["cluster"] for of_problem in problems.values()]
    fewest = min(map(len, problems.values()))
    if fewest > 1:
        powers = {2**exponent for exponent in range(fewest.bit_length())} | {fewest}
        right = [(sum(row["correct"] for row in of_problem), len(of_problem)) for of_problem in problems.values()]
        figures["pass_at_k"] = {
            str(k): clustered_mean([pass_at_k(*counts, k) for counts in right], clusters) for k in sorted(powers)
        }
    if has_variants:
        worst: dict[str, float] = defaultdict(lambda: 1.0)
        for of_problem, cluster in zip(problems.values(), clusters, strict=True):
            worst[cluster] = min(worst[cluster], statistics.fmean(row["correct"] for row in of_problem))
        figures["worst_variant"] = clustered_mean(list(worst.values()), list(worst))
    return figures


def accuracy(rows: Sequence[Row]) -> Estimate:
    """Returns the share of correct responses, with clusters of problems and their variants."""
    return clustered_mean([float(row["correct"]) for row in rows], [row["cluster"] for row in rows])


def macro_average(estimates: Sequence[Fields]) -> Tree:
    """Returns the unweighted mean of independent benchmarks, with `sqrt(sum of squared errors) / number`."""
    errors = [estimate["error"] for estimate in estimates]
    return {
        "mean": statistics.fmean(estimate["mean"] for estimate in estimates),
        "error": None if None in errors else math.hypot(*errors) / len(errors),
        "num_benchmarks": len(estimates),
    }


def write_results(folder: Path, description: Fields, benchmarks: Fields) -> Tree:
    """Writes evaluation.json: the description, each benchmark's statistics, and the average over several benchmarks."""
    results = {**description, "benchmarks": dict(benchmarks)}
    if len(benchmarks) > 1:
        results["average"] = macro_average([figures["accuracy"] for figures in benchmarks.values()])
    write_atomically(folder / RESULTS_FILE, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


def figure_rows(results: Fields) -> Iterator[list[str]]:
    """Yields a head, and rows of accuracies in percent with errors, by kind of answer if there are several."""
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
        kinds = figures["by_kind"]
        for kind in kinds if len(kinds) > 1 else ():
            yield [f"  {kind}", str(kinds[kind]["num_problems"]), percent(kinds[kind]), *rest]
    if "average" in results:
        yield ["average", "", percent(results["average"]), *rest]


def percent(estimate: Fields, *, sign: str = "") -> str:
    """Formats an estimate in percent, such as `43.4 ± 1.2`, without the error if there is none."""
    shown = f"{100 * estimate['mean']:{sign}.1f}"
    return shown if estimate["error"] is None else f"{shown} ± {100 * estimate['error']:.1f}"


def results_file(folder: Path) -> Path:
    """Returns an evaluation's file of results; raises `DataError` if it is not finished."""
    if not (folder / RESULTS_FILE).is_file():
        raise DataError(
            f"{folder} holds no finished evaluation ({RESULTS_FILE}); give a folder that cepo evaluate wrote"
        )
    return folder / RESULTS_FILE


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """Returns an evaluation's graded responses by benchmark; raises `DataError` if it is not finished."""
    results_file(folder)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in read_objects(folder / GENERATIONS_FILE, within=folder):
        if not all(isinstance(row.get(name), str) for name in ("benchmark", "problem_id", "cluster", "ground_truth")):
            raise DataError(f"{folder / GENERATIONS_FILE}: a row has no benchmark, problem or truth; evaluate again")
        rows[row["benchmark"]].append(row | {"correct": bool(row.get("correct"))})
    return rows


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
    pairs = read_rows(first), read_rows(second)
    common = [name for name in pairs[0] if name in pairs[1]]
    if not common:
        raise DataError(f"{first} has {', '.join(pairs[0])} and {second} has {', '.join(pairs[1])}: nothing to compare")
    return [_paired(name, pairs[0][name], pairs[1][name]) for name in common]


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


def _paired(name: str, first: Sequence[Row], second: Sequence[Row]) -> Paired:
    before, after = _shares(first), _shares(second)
    if before.keys() != after.keys():
        raise DataError(
            f"{name}: the two evaluations used different problems ({len(before)} and {len(after)}); "
            "evaluate both with the same data=, data.max_prompt_length and pixel limits"
        )
    return Paired(
        benchmark=name,
        num_problems=len(before),
        first=sum(before.values()) / len(before),
        second=sum(after.values()) / len(before),
        difference=clustered_mean([after[each] - before[each] for each in before], [cluster for *_, cluster in before]),
    )


def _shares(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Returns the share of right responses by problem, truth and cluster."""
    verdicts: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    for row in rows:
        verdicts[row["problem_id"], row["ground_truth"], row["cluster"]].append(row["correct"])
    return {problem: sum(right) / len(right) for problem, right in verdicts.items()}


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
            head, *rows = figure_rows(results)
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
    known = [*NAMES.values(), *(name for row in rows for name in row.cells if name not in (_AVERAGE, _DIFFERENCE))]
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
            NAMES.get(str(name), str(name)): _cell(figures["accuracy"], 100.0)
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
