"""A metric carries its reduction, so that parts combine to the result of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cepo.metrics import (
    Metric,
    fraction,
    max_value,
    mean_of,
    mean_value,
    merge_metrics,
    min_value,
    results,
    sum_value,
)


def test_means_of_2_and_6_values_merge_by_their_counts() -> None:
    merged = mean_of(torch.tensor([1.0, 3.0])).merge(mean_of(torch.full((6,), 6.0)))
    assert merged.result == (4 + 36) / 8


def test_masked_mean_counts_only_true_entries() -> None:
    metric = mean_of(torch.tensor([[1.0, 100.0], [2.0, 100.0]]), torch.tensor([[True, False], [True, False]]))
    assert (metric.result, metric.weight) == (1.5, 2.0)


def test_a_mean_over_nothing_is_absent_and_changes_no_other_mean() -> None:
    empty = mean_of(torch.tensor([1.0]), torch.tensor([False]))
    assert empty.result is None
    assert empty.merge(mean_value(3.0)).result == 3.0
    assert fraction(0, 0).result is None


def test_sums_add_and_extremes_keep_the_extreme() -> None:
    assert sum_value(2).merge(sum_value(3)).result == 5
    assert max_value(2).merge(max_value(3)).result == 3
    assert min_value(2).merge(min_value(3)).result == 2


def test_an_absent_extreme_gives_way_to_the_one_that_was_counted() -> None:
    absent = Metric(0.0, 0.0, "max")
    assert absent.result is None
    assert absent.merge(max_value(-4)).result == -4
    assert max_value(-4).merge(absent).result == -4


def test_three_of_4_and_none_of_12_merge_to_three_sixteenths() -> None:
    assert fraction(3, 4).merge(fraction(0, 12)).result == 3 / 16


def test_merging_different_reductions_is_refused() -> None:
    with pytest.raises(AssertionError, match="cannot merge mean with sum"):
        mean_value(1.0).merge(sum_value(1.0))


def test_merged_mappings_keep_names_of_one_part() -> None:
    merged = merge_metrics([{"a": mean_value(1.0, 3)}, {"a": mean_value(5.0), "b": sum_value(2), "c": fraction(0, 0)}])
    assert results(merged) == {"a": 2.0, "b": 2.0}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12), st.integers(0, 12))
def test_a_mean_does_not_depend_on_where_the_batch_is_split(values: list[float], cut: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    merged = mean_of(whole[:cut]).merge(mean_of(whole[cut:]))
    assert merged.result == pytest.approx(float(whole.mean()), abs=1e-12)


def test_means_of_float32_values_are_accumulated_in_float64() -> None:
    # one 2^24 and 2^10 ones: float32 would drop every one of them
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(1024)])
    assert mean_of(values).result == (2**24 + 1024) / 1025
