"""Groups of rows are spread over ranks by their cost, and stay whole."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepo.runtime.dispatch import balance_groups

COSTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=60)


@given(COSTS, st.integers(min_value=1, max_value=9))
def test_every_group_is_on_one_rank_and_in_order(costs: list[int], num_ranks: int) -> None:
    groups = balance_groups(costs, num_ranks)
    assert len(groups) == num_ranks
    assert sorted(index for group in groups for index in group) == list(range(len(costs)))
    assert all(group == sorted(group) for group in groups)


@given(st.lists(st.integers(min_value=0, max_value=50), min_size=1, max_size=6), st.integers(min_value=1, max_value=3))
def test_the_highest_load_is_within_four_thirds_of_the_best(costs: list[int], num_ranks: int) -> None:
    best = min(
        max(
            sum(cost for cost, chosen in zip(costs, choice, strict=True) if chosen == rank) for rank in range(num_ranks)
        )
        for choice in product(range(num_ranks), repeat=len(costs))
    )
    highest = max(sum(costs[index] for index in group) for group in balance_groups(costs, num_ranks))
    assert 3 * num_ranks * highest <= (4 * num_ranks - 1) * best


@pytest.mark.parametrize(
    ("costs", "num_ranks", "expected"),
    [([5, 9, 4, 4, 6], 2, [[1, 2], [0, 3, 4]]), ([0, 0, 0, 0], 2, [[0, 2], [1, 3]]), ([3], 3, [[0], [], []])],
)
def test_groups_go_longest_first_and_ties_by_number(
    costs: list[int], num_ranks: int, expected: list[list[int]]
) -> None:
    assert balance_groups(costs, num_ranks) == expected
