"""Compares two evaluations problem by problem."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.results import read_rows
from cepo.evaluation.statistics import Estimate, Row, clustered_mean

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
