"""Compares two evaluations problem by problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.results import read_rows
from cepo.evaluation.statistics import Estimate, Row, clustered_mean


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
