"""WeMath's four-way score, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from evaluation_folders import graded

from cepo.evaluation.group_scores import wemath_outcome, wemath_scores


def group(name: str, verdicts: str, *, sample: int = 0) -> list[dict[str, Any]]:
    """Rows of a group: a digit for each step, and one for the whole problem."""
    steps = [*map(str, range(1, len(verdicts))), "multi"]
    keys = [f"{len(verdicts) - 1}steps_{step}" for step in steps]
    return [
        graded(0, digit == "1", cluster=name, groups={"key": key}, sample=sample)
        for key, digit in zip(keys, verdicts, strict=True)
    ]


@pytest.mark.parametrize(
    ("verdicts", "strict", "loose"),
    [
        ("111", "CM", "CM"),
        ("101", "RM", "CM"),
        ("011", "RM", "CM"),
        ("001", "RM", "RM"),
        ("110", "IG", "IG"),
        ("100", "IK", "IK"),
        ("000", "IK", "IK"),
        ("1111", "CM", "CM"),
        ("0011", "RM", "CM"),
        ("0001", "RM", "RM"),
        ("1110", "IG", "IG"),
        ("1010", "IK", "IK"),
    ],
)
def test_each_group_has_one_of_four_outcomes(verdicts: str, strict: str, loose: str) -> None:
    right = {row["groups"]["key"]: row["correct"] for row in group("g", verdicts)}
    assert (wemath_outcome(right, is_strict=True), wemath_outcome(right, is_strict=False)) == (strict, loose)


def test_wemaths_four_way_score_by_hand() -> None:
    """Five groups: CM, RM or CM, RM, IG, IK. Strict: CM 1, RM 2: (1 + 0.5) / 5. Loose: CM 2, RM 1: (2 + 0.5) / 5."""
    rows = [*group("a", "111"), *group("b", "0011"), *group("c", "001"), *group("d", "1110"), *group("e", "100")]
    scores = wemath_scores(rows)
    means = {name: score["mean"] for name, score in scores.items() if isinstance(score, dict)}
    assert means == pytest.approx({
        "score_strict": 0.3, "score_loose": 0.5,
        "IK": 0.2, "IG": 0.2, "CM_strict": 0.2, "CM_loose": 0.4, "RM_strict": 0.4, "RM_loose": 0.2,
        "RM_rate_strict": 2 / 3, "RM_rate_loose": 1 / 3,
    })  # fmt: skip
    assert (scores["num_groups"], scores["num_incomplete_groups"]) == (5, 0)
    # Of the points 1, 0, 0, 0.5, 0 the sd is sqrt(0.2), the error sd / sqrt(5) = 0.2.
    assert scores["score_strict"]["error"] == pytest.approx(0.2)


def test_a_group_without_one_of_its_rows_does_not_count() -> None:
    complete, incomplete = group("a", "111"), group("b", "1111")[:3]
    scores = wemath_scores([*complete, *incomplete])
    assert (scores["num_groups"], scores["num_incomplete_groups"], scores["score_strict"]["mean"]) == (1, 1, 1.0)
    assert wemath_scores(incomplete) == {"num_groups": 0, "num_incomplete_groups": 1}


def test_the_second_responses_of_a_group_stand_together() -> None:
    """Response 0 masters the problem, response 1 fails it: the score is 1 / 2 of one group."""
    scores = wemath_scores([*group("a", "111"), *group("a", "000", sample=1)])
    assert (scores["score_strict"]["mean"], scores["num_groups"]) == (0.5, 1)
