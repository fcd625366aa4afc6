"""Evaluations compared problem by problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_folders import evaluation, graded

from cepo.errors import DataError
from cepo.evaluation.comparison import compare_evaluations, score_table
from cepo.evaluation.results import GENERATIONS_FILE
from cepo.run_folder.writing import encode_line


def test_a_paired_difference_drops_what_both_models_share(tmp_path: Path) -> None:
    # Differences per problem: 0, 0, 1, 0. Their mean is 0.25, their sd 0.5, the error 0.25; unpaired it would be 0.38.
    first, second = evaluation(tmp_path / "first", "1001"), evaluation(tmp_path / "second", "1011")
    (paired,), (back,) = compare_evaluations(first, second), compare_evaluations(second, first)
    assert (paired.benchmark, paired.num_problems, paired.first, paired.second) == ("dynamath", 4, 0.5, 0.75)
    assert (paired.difference["mean"], paired.difference["error"]) == (0.25, pytest.approx(0.25))
    assert (back.difference["mean"], back.difference["error"]) == (-0.25, pytest.approx(0.25))


def test_a_paired_difference_is_clustered_by_variants(tmp_path: Path) -> None:
    """Of 4 variants of 2 questions, both of the second question change: differences 0, 0, 1, 1 in clusters 0, 0, 1, 1.

    The residual sums of the clusters are -1 and 1: error^2 = 2 / 1 * (1 + 1) / 16, so 0.5. Unclustered it were 0.289.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, right in ((first, "1100"), (second, "1111")):
        evaluation(folder, right)
        rows = [graded(number, digit == "1", cluster=str(number // 2)) for number, digit in enumerate(right)]
        (folder / GENERATIONS_FILE).write_bytes(b"".join(map(encode_line, rows)))
    (paired,) = compare_evaluations(first, second)
    assert paired.difference == {"mean": 0.5, "error": pytest.approx(0.5), "num_clusters": 2}


def test_responses_without_a_verdict_are_not_compared(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "first", "10"), evaluation(tmp_path / "second", "11")
    for folder in (first, second):
        with (folder / GENERATIONS_FILE).open("ab") as file:
            file.write(encode_line(graded(2, False) | {"correct": None}))
    (paired,) = compare_evaluations(first, second)
    assert (paired.num_problems, paired.first, paired.second) == (2, 0.5, 1.0)


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
