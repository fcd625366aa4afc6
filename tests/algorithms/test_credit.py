"""Group advantages, the evidence kernel and their metrics, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from factories import weighted_advantages
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from cepo.algorithms import credit, group_advantages
from cepo.algorithms.settings import GroupAdvantageConfig
from cepo.metrics import Metrics, mean_value, results

HALF_RIGHT = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def advantages(rewards: list[float], ids: list[int] | None = None, **options: object) -> torch.Tensor:
    groups = torch.tensor(ids or [0] * len(rewards))
    return group_advantages(torch.tensor(rewards), groups, GroupAdvantageConfig(**options))  # type: ignore[arg-type]


def test_advantages_of_eight_are_those_worked_out_by_hand() -> None:
    """Half are right: unbiased variance 8 * 0.25 / 7 = 2/7, 0.5 / 0.534523 = 0.935413; else 1, or 0.5 unscaled.

    One is right: mean 1/8, variance (49/64 + 7/64) / 7 = 1/8; 0.875 / 0.353553 = 2.474874, -0.125 / 0.353553 = -0.353553.
    """
    expected = 0.5 / (math.sqrt(2 / 7) + 1e-6)
    assert expected == pytest.approx(0.93541, abs=1e-5)
    torch.testing.assert_close(advantages(HALF_RIGHT), torch.tensor([expected] * 4 + [-expected] * 4))
    torch.testing.assert_close(advantages(HALF_RIGHT, ddof=0), torch.tensor([1.0] * 4 + [-1.0] * 4), atol=3e-6, rtol=0)
    assert advantages(HALF_RIGHT, scale="none").tolist() == [0.5] * 4 + [-0.5] * 4
    assert advantages([1.0] + [0.0] * 7).tolist() == pytest.approx([2.474874] + [-0.353553] * 7, abs=1e-5)


def test_the_floor_is_added_to_a_deviation() -> None:
    """The floor of 1e-6 is added to the deviation and does not bound it from below."""
    # Rewards 0 and 2e-6: deviation 1.4142e-6, 1e-6 / 2.4142e-6 = 0.41421; bounded from below it would be 0.70711.
    found = group_advantages(torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([1 - math.sqrt(2), math.sqrt(2) - 1], rel=1e-6)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=16), st.floats(0.25, 4), st.floats(-3, 3))
def test_scaling_or_shifting_rewards_changes_no_advantage(rewards: list[float], factor: float, offset: float) -> None:
    moved = advantages([factor * reward + offset for reward in rewards])
    torch.testing.assert_close(moved, advantages(rewards), rtol=1e-4, atol=1e-4)


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_0_with_deviation_at_most_1(rewards: list[float]) -> None:
    values = advantages(rewards).double()
    assert abs(float(values.sum())) < 1e-5
    assert float(values.std()) <= 1 + 1e-6


def test_an_advantage_below_1e_6_has_sign_0() -> None:
    signs = credit.advantage_sign(torch.tensor([-2.0, -9e-7, 0.0, 9e-7, 2e-6]))
    assert signs.tolist() == [-1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("advantage", "delta", "factor"),
    [
        (2.0, math.log(1.2), 1.1),  # w = 1.2, 0.5 + 0.5 * 1.2
        (2.0, 5.0, 1.25),  # w clipped to 1.5
        (2.0, -5.0, 0.75),  # w clipped to 0.5
        (-2.0, 5.0, 0.75),  # evidence for the right answer lightens a wrong rollout's blame
        (-2.0, -5.0, 1.25),
        (-2.0, -math.log(1.2), 1.1),
        (5e-7, 5.0, 1.0),  # sign 0
    ],
)
def test_evidence_factors_are_those_worked_out_by_hand(advantage: float, delta: float, factor: float) -> None:
    """The case has lambda = 0.5 and clip radius = 0.5."""
    exact = torch.tensor([advantage, delta], dtype=torch.float64)
    weighted = weighted_advantages(exact[:1], exact[None, 1:], mixing=0.5, clip_radius=0.5)
    assert float(weighted) == pytest.approx(advantage * factor, rel=1e-12)


def test_a_group_is_live_from_a_range_of_a_millionth_on() -> None:
    rewards = torch.tensor([0.0, 1e-6, 0.0, 0.9e-6, 0.5, 0.5], dtype=torch.float64)
    live = credit.live_rows(rewards, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert live.tolist() == [True, True, False, False, False, False]


def test_evidence_metrics_count_tokens_of_rows_with_an_advantage() -> None:
    delta = torch.tensor([[1.0, -0.5, 0.0, 9.0], [2.0, 1.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [True, True, True, True]])
    advantages, correct = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([True, False, True])
    values = results(credit.evidence_metrics(delta, advantages, mask, correct, mixing=0.25, clip_radius=0.5))
    # counted deltas: 1, -0.5, 0 at A > 0 and 2, 1 at A < 0; sign * delta: 1, -0.5, 0, -2, -1; log 1.5 = 0.405, log 0.5 = -0.693
    expected = {
        "lambda": 0.25,
        "positive_fraction": 3 / 5,
        "negative_fraction": 1 / 5,
        "clip_high_rate": 1 / 5,
        "clip_low_rate": 2 / 5,
        "disagreement_rate": 3 / 5,
        "weight_mean": (1.5 + math.exp(-0.5) + 1.0 + 0.5 + 0.5) / 5,
        "delta_mean_right": 0.5 / 3,
        "delta_mean_wrong": 1.5,
        "delta_mean_positive_advantage": 0.5 / 3,
        "delta_mean_negative_advantage": 1.5,
        "delta_std_wrong": math.sqrt(0.5),
    }
    assert {name: values[f"evidence/{name}"] for name in expected} == pytest.approx(expected)


def metrics_of(delta: list[list[float]], advantages: list[float], *, correct: bool) -> Metrics:
    """Of responses without padding, under lambda 0.5 and radius 0.5."""
    rows, mask = torch.tensor(advantages), torch.ones(len(delta), len(delta[0]), dtype=torch.bool)
    verdicts = torch.full((len(delta),), correct)
    return credit.evidence_metrics(torch.tensor(delta), rows, mask, verdicts, mixing=0.5, clip_radius=0.5)


def test_the_spread_of_one_delta_adds_nothing_to_a_mean() -> None:
    metrics = metrics_of([[1.0]], [1.0], correct=True)
    for side in ("right", "wrong"):
        assert metrics[f"evidence/delta_std_{side}"].result is None
        assert metrics[f"evidence/delta_std_{side}"].merge(mean_value(0.5, 3.0)).result == 0.5


def test_evidence_counts_above_a_thousandth_of_a_nat() -> None:
    values = results(metrics_of([[0.0011, 0.0009, -0.0011, -0.0009]], [1.0], correct=True))
    names = ("positive_fraction", "negative_fraction", "disagreement_rate")
    assert [values[f"evidence/{name}"] for name in names] == [0.25] * 3


def test_right_and_wrong_is_the_verdict_not_the_advantage() -> None:
    """A wrong rollout with an advantage above 0 still counts as wrong."""
    values = results(metrics_of([[1.0], [3.0], [5.0]], [1.15, -0.58, -0.58], correct=False))  # the first has a bonus
    assert "evidence/delta_mean_right" not in values
    assert values["evidence/delta_mean_wrong"] == pytest.approx(3.0)


def test_group_metrics_are_shares_of_four_groups() -> None:
    correct = torch.tensor([True, True, False, False, True, False, False, True])
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    values = results(credit.group_metrics(correct.float(), correct, ids))
    expected = {"all_right": 0.25, "all_wrong": 0.25, "mixed": 0.5, "flat_rollouts": 0.5}
    assert values == {f"groups/{name}": value for name, value in expected.items()}


def test_shapes_of_the_core_are_checked_in_tests() -> None:
    with pytest.raises(TypeCheckError):
        credit.over_response(torch.zeros(3), torch.ones(2, 4, dtype=torch.bool))
