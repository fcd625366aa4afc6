"""A metric carries its reduction, so that parts combine to the result of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cepo.metrics import Metric, fraction, max_value, mean_of, mean_value, merge_metrics, min_value, results, sum_value


def test_masked_mean_counts_only_true_entries() -> None:
    metric = mean_of(torch.tensor([[1.0, 100.0], [2.0, 100.0]]), torch.tensor([[True, False], [True, False]]))
    assert metric.result == 1.5
    assert metric.weight == 2.0


def test_a_mean_over_nothing_is_absent_and_changes_no_other_mean() -> None:
    empty = mean_of(torch.tensor([1.0]), torch.tensor([False]))
    assert empty.result is None
    assert empty.merge(mean_value(3.0)).result == 3.0
    assert fraction(0, 0).result is Metric(0.0, 0.0, "max").result is None


@pytest.mark.parametrize(
    ("left", "right", "merged"),
    [
        (sum_value(2), sum_value(3), 5),
        (max_value(2), max_value(3), 3),
        (min_value(2), min_value(3), 2),
        (Metric(0.0, 0.0, "max"), max_value(-4), -4),  # nothing was counted
        (fraction(3, 4), fraction(0, 12), 3 / 16),
        (mean_of(torch.tensor([1.0, 3.0])), mean_of(torch.full((6,), 6.0)), (4 + 36) / 8),
    ],
)
def test_parts_merge_by_their_reduction(left: Metric, right: Metric, merged: float) -> None:
    assert left.merge(right).result == right.merge(left).result == merged


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
