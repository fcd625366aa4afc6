"""Computes means of graded responses with standard errors clustered by problem, pass@k, and scores of groups of rows.

Rows are those of generations.jsonl. With several responses to a problem, a score of groups, HallusionBench's or WeMath's, is
the mean over responses: the first ones together, the second ones together, and so on.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypedDict

from cepo.errors import DataError
from cepo.files.trees import Fields, Tree
from cepo.report.score_tables import Cell
from cepo.rewards.benchmark import KINDS

Row = Fields
"""One graded response of generations.jsonl; see `cepo.evaluation.tasks.graded_rows`."""
WEMATH_STEPS = {"2steps": 2, "3steps": 3}
"""The number of one-step rows in a group of WeMath, by the beginning of the rows' `key`."""


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


def hallusionbench_scores(rows: Sequence[Row]) -> Tree:
    """Returns HallusionBench's accuracies as estimates with clusters of sets.

    - `aAcc`: the share of right answers.
    - `qAcc`: the share of questions answered right with every figure on which they are asked; a question is given by
      category, subcategory, set and question.
    - `fAcc`: the share of figures about which every question is answered right; rows without a figure (category VS,
      figure 0) are left out.

    Source: Guan et al., arXiv 2310.14566, and github.com/tianyi-lab/HallusionBench, utils.py, at 744007c. There a model
    judges free text; here the answer is the word yes or no.
    """
    with_figure = [row for row in rows if row["groups"]["figure"]]
    scores: Tree = {
        "aAcc": accuracy(rows),
        "qAcc": _share_all_right(rows, lambda row: row["groups"]["question"]),
    }
    if with_figure:
        scores["fAcc"] = _share_all_right(with_figure, lambda row: row["groups"]["figure"])
    return scores


def _share_all_right(rows: Sequence[Row], group_of: Callable[[Row], str]) -> Estimate:
    """Returns the share of groups in which every row is right."""
    verdicts: dict[tuple[str, int], list[bool]] = defaultdict(list)
    clusters: dict[tuple[str, int], str] = {}
    for row in rows:
        group = (group_of(row), row["sample"])
        verdicts[group].append(row["correct"])
        clusters[group] = row["cluster"]
    are_all_right = [float(all(verdicts_of_group)) for verdicts_of_group in verdicts.values()]
    return clustered_mean(are_all_right, list(clusters.values()))


_POINTS = {"CM": 1.0, "IG": 0.5, "RM": 0.0, "IK": 0.0}
"""What an outcome of WeMath adds to its score."""


def wemath_scores(rows: Sequence[Row]) -> Tree:
    """Returns WeMath's four-way scores over its groups, strict and loose, and the number of groups.

    A group has a problem of several steps and a problem for each step. Of N complete groups:

    - `IK`, insufficient knowledge: the problem is wrong, and a step is wrong;
    - `IG`, inadequate generalization: the problem is wrong, and all steps are right;
    - `CM`, complete mastery: the problem is right, and all steps are right (strict), or any step is (loose);
    - `RM`, rote memorization: the problem is right, and any step is wrong (strict), or all steps are (loose).

    `score = (N - 0.5 IG - RM - IK) / N = (CM + 0.5 IG) / N`. The four shares add up to 1. `RM_rate` is `RM / (CM + RM)`,
    which the authors print in place of the share. Groups of which a row is left out do not count.

    Source: Qiao et al., arXiv 2407.01284, and github.com/We-Math/We-Math, evaluation/four_dimensional_metrics.py, at
    a57a0e8, whose N is always 525.
    """
    groups: dict[tuple[str, int], dict[str, bool]] = defaultdict(dict)  # verdicts by the rows' keys
    for row in rows:
        groups[row["cluster"], row["sample"]][row["groups"]["key"]] = row["correct"]
    complete_groups: list[dict[str, bool]] = []
    clusters: list[str] = []  # of the complete groups
    for (cluster, _), verdicts in groups.items():
        if _is_complete(verdicts):
            complete_groups.append(verdicts)
            clusters.append(cluster)
    all_clusters = {cluster for cluster, _ in groups}
    scores: Tree = {
        "num_groups": len(set(clusters)),
        "num_incomplete_groups": len(all_clusters - set(clusters)),
    }
    if not complete_groups:
        return scores
    for rule in ("strict", "loose"):
        outcomes = [wemath_outcome(verdicts, is_strict=rule == "strict") for verdicts in complete_groups]
        scores[f"score_{rule}"] = clustered_mean([_POINTS[outcome] for outcome in outcomes], clusters)
        for name in ("CM", "RM"):
            scores[f"{name}_{rule}"] = _share(name, outcomes, clusters)
        solved = [number for number, outcome in enumerate(outcomes) if outcome in ("CM", "RM")]
        if solved:
            outcomes_of_solved = [outcomes[number] for number in solved]
            clusters_of_solved = [clusters[number] for number in solved]
            scores[f"RM_rate_{rule}"] = _share("RM", outcomes_of_solved, clusters_of_solved)
        for name in ("IG", "IK"):  # the same by both rules
            scores[name] = _share(name, outcomes, clusters)
    return scores


def _share(name: str, outcomes: Sequence[str], clusters: Sequence[str]) -> Estimate:
    return clustered_mean([float(outcome == name) for outcome in outcomes], clusters)


def _is_complete(verdicts: dict[str, bool]) -> bool:
    """Returns whether the rows of a group are those of its kind, by their `key` such as 2steps_1 and 2steps_multi."""
    first_key = next(iter(verdicts))
    size, _, _ = first_key.partition("_")
    expected_keys = {f"{size}_{step}" for step in range(1, WEMATH_STEPS[size] + 1)}
    expected_keys.add(f"{size}_multi")
    return verdicts.keys() == expected_keys


def wemath_outcome(verdicts: dict[str, bool], *, is_strict: bool) -> str:
    """Returns which of the four outcomes a complete group has; see `wemath_scores`."""
    steps = [right for key, right in verdicts.items() if not key.endswith("_multi")]
    is_solved = next(right for key, right in verdicts.items() if key.endswith("_multi"))
    if not is_solved:
        return "IG" if all(steps) else "IK"
    knows_steps = all(steps) if is_strict else any(steps)
    return "CM" if knows_steps else "RM"
