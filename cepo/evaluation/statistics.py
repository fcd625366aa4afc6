"""Computes means of graded responses with standard errors clustered by problem, and pass@k."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypedDict

from cepo.errors import DataError
from cepo.files.trees import Fields, Tree
from cepo.report.score_tables import Cell
from cepo.rewards.benchmark import KINDS

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

    `accuracy` is the mean over all responses (avg@n), `by_kind` the same by kind of answer, and `by_category` by the
    values of each category of the benchmark. `pass_at_k` needs several responses to a problem. `worst_variant`, the mean
    over questions of the lowest accuracy of any variant, is given if a cluster has the variants of one question. Raises
    `DataError` without responses.
    """
    if not rows:
        raise DataError("no response was graded")
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
        "by_category": _by_category(rows),
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


def _by_category(rows: Sequence[Row]) -> Tree:
    """Returns the accuracy for each value of each category; a row counts for each of its values."""
    grouped: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        categories: dict[str, list[str]] = row.get("categories") or {}
        for category, values in categories.items():
            for value in values:
                grouped[category][value].append(row)
    return {
        category: {
            value: {"num_problems": len({row["problem_id"] for row in of_value}), **accuracy(of_value)}
            for value, of_value in sorted(values.items())
        }
        for category, values in grouped.items()
    }


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
