"""Figures of evaluations worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from evaluation_folders import graded

from cepo.errors import DataError
from cepo.evaluation.statistics import Estimate, benchmark_figures, clustered_mean, macro_average, pass_at_k


@pytest.mark.parametrize(
    ("values", "clusters", "mean", "error"),
    [
        # sd = sqrt((3 * 0.25^2 + 0.75^2) / 3) = 0.5, over sqrt(4); ten copies of each response change nothing.
        ([1.0, 1.0, 1.0, 0.0], [1, 2, 3, 4], 0.75, 0.25),
        ([1.0, 1.0, 1.0, 0.0] * 10, [1, 2, 3, 4] * 10, 0.75, 0.25),
        ([1.0, 1.0, 1.0, 0.0] * 10, range(40), 0.75, math.sqrt(0.1875 / 39)),
        # Mean 0.5; residual sums: 0.5 + 0.5 - 0.5 = 0.5 and -0.5. error^2 = 2 / 1 * (0.25 + 0.25) / 16.
        ([1.0, 1.0, 0.0, 0.0], ["a", "a", "a", "b"], 0.5, math.sqrt(2 * 0.5 / 16)),
        ([1.0, 0.0], ["a", "a"], 0.5, None),
    ],
)
def test_an_error_is_that_of_clusters(
    values: list[float], clusters: Sequence[Any], mean: float, error: float | None
) -> None:
    expected = Estimate(mean=mean, error=pytest.approx(error), num_clusters=len(set(clusters)))
    assert clustered_mean(values, clusters) == expected


@pytest.mark.parametrize(
    ("right", "samples", "k", "chance"),
    [(1, 4, 1, 0.25), (1, 4, 2, 0.5), (2, 4, 2, 5 / 6), (0, 4, 4, 0.0), (1, 4, 4, 1.0), (3, 4, 2, 1.0)],
)
def test_pass_at_k_is_the_chance_that_k_hold_a_right_one(right: int, samples: int, k: int, chance: float) -> None:
    assert pass_at_k(right, samples, k) == pytest.approx(chance)


def means_of(estimates: Mapping[str, Any]) -> dict[str, float]:
    return {name: estimate["mean"] for name, estimate in estimates.items()}


def responses_of(problem: int, verdicts: str, **fields: Any) -> list[dict[str, Any]]:
    """A response for each digit, right where it is 1."""
    return [graded(problem, digit == "1", **fields) for digit in verdicts]


def test_figures_of_2_problems_with_2_responses_each() -> None:
    rows = [
        graded(0, True, length=4),
        graded(0, False, length=6, finished=False, answer=None),
        graded(1, False, length=20, kind="choice"),
        graded(1, False, length=10, kind="choice"),
    ]
    figures = benchmark_figures(rows)
    assert figures["num_problems"] == 2
    assert figures["num_responses"] == 4
    assert figures["num_right"] == 1
    assert figures["accuracy"] == {"mean": 0.25, "error": pytest.approx(0.25), "num_clusters": 2}
    assert means_of(figures["by_kind"]) == {"choice": 0.0, "numeric": 0.5}
    assert figures["response_length"] == {"mean": 10.0, "median": 8.0, "max": 20}
    assert figures["share_cut_off"] == 0.25
    assert figures["share_without_answer"] == 0.25
    assert means_of(figures["pass_at_k"]) == {"1": 0.25, "2": 0.5}
    assert "worst_variant" not in figures


def test_the_worst_variant_of_each_question_counts() -> None:
    rows = [
        graded(0, True, cluster="a"),
        graded(1, True, cluster="a"),
        graded(2, True, cluster="b"),
        graded(3, False, cluster="b"),
    ]
    figures = benchmark_figures(rows, has_variants=True)
    assert figures["accuracy"]["mean"] == 0.75
    assert figures["accuracy"]["num_clusters"] == 2
    assert figures["worst_variant"]["mean"] == 0.5
    assert "pass_at_k" not in figures


def test_the_worst_variant_is_that_of_the_lowest_mean() -> None:
    """Of 2 responses each, the variants have 1 / 2, 0 / 2 and 2 / 2 right: the worst has 0, the last 1."""
    rows = responses_of(0, "10", cluster="a")
    rows += responses_of(1, "00", cluster="a")
    rows += responses_of(2, "11", cluster="a")
    assert benchmark_figures(rows, has_variants=True)["worst_variant"]["mean"] == 0.0


def test_pass_at_k_reaches_to_the_fewest_responses() -> None:
    """Problem 0 has 2 responses, one right, and problem 1 has 4, one right: k is 1 or 2.

    pass@1 = (1/2 + 1/4) / 2, pass@2 = (1 + 1/2) / 2.
    """
    rows = [*responses_of(0, "10"), *responses_of(1, "1000")]
    powers = benchmark_figures(rows)["pass_at_k"]
    assert means_of(powers) == {"1": 0.375, "2": 0.75}


def test_accuracies_by_category_count_each_value_of_a_row() -> None:
    rows = [
        graded(0, True, categories={"skills": ["algebra", "geometry"]}),
        graded(1, False, categories={"skills": ["algebra"], "grade": ["college"]}),
        graded(2, True, categories={}),
    ]
    by_category = benchmark_figures(rows)["by_category"]
    assert set(by_category) == {"skills", "grade"}
    assert means_of(by_category["skills"]) == {"algebra": 0.5, "geometry": 1.0}
    assert means_of(by_category["grade"]) == {"college": 0.0}
    assert by_category["skills"]["algebra"]["num_problems"] == 2
    with pytest.raises(DataError, match="no response was graded"):
        benchmark_figures([])


def test_an_average_of_two_has_half_the_root_of_squared_errors() -> None:
    two = [Estimate(mean=0.4, error=0.03, num_clusters=9), Estimate(mean=0.6, error=0.04, num_clusters=9)]
    assert macro_average(two) == {"mean": 0.5, "error": pytest.approx(0.025), "num_benchmarks": 2}
    assert macro_average([*two, Estimate(mean=0.5, error=None, num_clusters=1)])["error"] is None
