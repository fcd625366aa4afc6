"""Computes the scores that WeMath defines over groups of rows.

Rows are those of generations.jsonl. With several responses to a problem, a score is the mean over responses: the first
ones together, the second ones together, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cepo.evaluation.formats import WEMATH_STEPS
from cepo.evaluation.statistics import Estimate, Row, clustered_mean
from cepo.files.trees import Tree

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
