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
"""One graded response of generations.jsonl; see `cepo.evaluation.tasks.graded_rows`."""


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
    rows_by_problem: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_problem[row["problem_id"]].append(row)
    problems = list(rows_by_problem.values())
    clusters = [responses[0]["cluster"] for responses in problems]
    figures: Tree = {
        "num_problems": len(problems),
        "num_responses": len(rows),
        "num_right": sum(row["correct"] for row in rows),
        "accuracy": accuracy(rows),
        "by_kind": _by_kind(rows),
        "by_category": _by_category(rows),
        "response_length": {
            "mean": statistics.fmean(lengths),
            "median": statistics.median(lengths),
            "max": max(lengths),
        },
        "share_cut_off": statistics.fmean(not row["finished"] for row in rows),
        "share_without_answer": statistics.fmean(row["answer"] is None for row in rows),
    }
    fewest_responses = min(len(responses) for responses in problems)
    if fewest_responses > 1:
        figures["pass_at_k"] = _pass_at_powers(problems, clusters, fewest_responses)
    if has_variants:
        figures["worst_variant"] = _worst_variant(problems, clusters)
    return figures


def _pass_at_powers(problems: Sequence[Sequence[Row]], clusters: Sequence[Hashable], most: int) -> Tree:
    """Returns pass@k for each power of two up to `most`, the number of responses that every problem has, and for it."""
    powers = {2**exponent for exponent in range(most.bit_length())}
    estimates: Tree = {}
    for k in sorted(powers | {most}):
        values: list[float] = []
        for responses in problems:
            num_right = sum(row["correct"] for row in responses)
            values.append(pass_at_k(num_right, len(responses), k))
        estimates[str(k)] = clustered_mean(values, clusters)
    return estimates


def _worst_variant(problems: Sequence[Sequence[Row]], clusters: Sequence[Hashable]) -> Estimate:
    """Returns the mean over questions, which are clusters of problems, of the lowest accuracy of a variant."""
    lowest: dict[Hashable, float] = defaultdict(lambda: 1.0)
    for responses, cluster in zip(problems, clusters, strict=True):
        share_right = statistics.fmean(row["correct"] for row in responses)
        lowest[cluster] = min(lowest[cluster], share_right)
    return clustered_mean(list(lowest.values()), list(lowest))


def _by_kind(rows: Sequence[Row]) -> Tree:
    """Returns the accuracy for each kind of answer that occurs."""
    figures: Tree = {}
    for kind in KINDS:
        rows_of_kind = [row for row in rows if row["kind"] == kind]
        if rows_of_kind:
            figures[kind] = _accuracy_of_part(rows_of_kind)
    return figures


def _by_category(rows: Sequence[Row]) -> Tree:
    """Returns the accuracy for each value of each category; a row counts for each of its values."""
    grouped: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        categories: dict[str, list[str]] = row.get("categories") or {}
        for category, values in categories.items():
            for value in values:
                grouped[category][value].append(row)
    figures: Tree = {}
    for category, rows_by_value in grouped.items():
        figures[category] = {value: _accuracy_of_part(rows_by_value[value]) for value in sorted(rows_by_value)}
    return figures


def _accuracy_of_part(rows: Sequence[Row]) -> Tree:
    problems = {row["problem_id"] for row in rows}
    return {"num_problems": len(problems), **accuracy(rows)}


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
