"""Evaluations compared problem by problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_folders import evaluation

from cepo.errors import DataError
from cepo.evaluation.comparison import compare_evaluations
from cepo.evaluation.published import score_table


def test_a_paired_difference_drops_what_both_models_share(tmp_path: Path) -> None:
    # Differences per problem: 0, 0, 1, 0. Their mean is 0.25, their sd 0.5, the error 0.25; unpaired it would be 0.38.
    first, second = evaluation(tmp_path / "first", "1001"), evaluation(tmp_path / "second", "1011")
    (paired,), (back,) = compare_evaluations(first, second), compare_evaluations(second, first)
    assert (paired.benchmark, paired.num_problems, paired.first, paired.second) == ("dynamath", 4, 0.5, 0.75)
    assert (paired.difference["mean"], paired.difference["error"]) == (0.25, pytest.approx(0.25))
    assert (back.difference["mean"], back.difference["error"]) == (-0.25, pytest.approx(0.25))


@pytest.mark.parametrize(
    ("right", "changed", "words"),
    [
        ("1", {}, "used different problems"),
        ("11", {"ground_truth": "6"}, "used different problems"),
        ("11", {"benchmark": "mmmu"}, "nothing to compare"),
        (None, {}, "no finished evaluation"),
    ],
)
def test_evaluations_of_other_problems_are_not_paired(
    tmp_path: Path, right: str | None, changed: dict[str, Any], words: str
) -> None:
    first, other = evaluation(tmp_path / "first", "11"), tmp_path / "other"
    if right is not None:
        evaluation(other, right, **changed)
    with pytest.raises(DataError, match=words):
        compare_evaluations(first, other)
    if right is None:
        with pytest.raises(DataError, match=words):
            score_table([str(tmp_path)])
