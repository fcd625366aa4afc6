"""Advantages of groups and of EasyR1's other estimators, the evidence kernel and metrics, against numbers by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from factories import log_probs_like, response_mask, token_batch, weighted_advantages
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from cepo.algorithms import build_estimator, group_advantages, statistics
from cepo.algorithms.settings import GroupAdvantageConfig
from cepo.algorithms.statistics import generalised_advantages, whitened
from cepo.errors import ConfigError
from cepo.metrics import Metrics, mean_value, results
from cepo.types import TokenBatch, TokenSignal

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


def test_scale_mean_divides_by_the_mean_reward_of_the_group() -> None:
    """One of four is right: mean 1/4, so (1 - 1/4) / (1/4) = 3 and -1. Three of four: 1/3 and -1.

    A group whose mean is not positive has A = 0: rewards -1 and 1 average to 0.
    """
    assert advantages([1.0, 0.0, 0.0, 0.0], scale="mean").tolist() == [3.0, -1.0, -1.0, -1.0]
    assert advantages([1.0, 1.0, 1.0, 0.0], scale="mean").tolist() == pytest.approx([1 / 3] * 3 + [-1.0])
    assert advantages([-1.0, 1.0, -3.0, 1.0], [0, 0, 1, 1], scale="mean").tolist() == [0.0] * 4
    assert advantages([0.0, 0.0], scale="mean").tolist() == [0.0, 0.0]


def test_the_floor_is_added_to_a_deviation() -> None:
    """The floor of 1e-6 is added to the deviation and does not bound it from below."""
    # Rewards 0 and 2e-6: deviation 1.4142e-6, 1e-6 / 2.4142e-6 = 0.41421; bounded from below it would be 0.70711.
    actual = group_advantages(torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.tensor([0, 0]))
    assert actual.tolist() == pytest.approx([1 - math.sqrt(2), math.sqrt(2) - 1], rel=1e-6)


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
    signs = statistics.advantage_sign(torch.tensor([-2.0, -9e-7, 0.0, 9e-7, 2e-6]))
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
    live = statistics.live_rows(rewards, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert live.tolist() == [True, True, False, False, False, False]


def test_metrics_of_delta_count_tokens_of_rows_with_an_advantage() -> None:
    delta = torch.tensor([[1.0, -0.5, 0.0, 9.0], [2.0, 1.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [True, True, True, True]])
    advantages = torch.tensor([1.0, -1.0, 0.0])
    correct = torch.tensor([True, False, True])
    values = results(statistics.delta_metrics(delta, advantages, mask, correct, mixing=0.25))
    # counted deltas: 1, -0.5, 0 at A > 0 and 2, 1 at A < 0; sign * delta: 1, -0.5, 0, -2, -1
    expected = {
        "lambda": 0.25,
        "positive_fraction": 3 / 5,
        "negative_fraction": 1 / 5,
        "disagreement_rate": 3 / 5,
        "delta_mean_right": 0.5 / 3,
        "delta_mean_wrong": 1.5,
        "delta_mean_positive_advantage": 0.5 / 3,
        "delta_mean_negative_advantage": 1.5,
        "delta_std_wrong": math.sqrt(0.5),
    }
    assert {name: values[f"evidence/{name}"] for name in expected} == pytest.approx(expected)


def metrics_of(delta: list[list[float]], advantages: list[float], *, correct: bool) -> Metrics:
    """Of responses without padding, under lambda 0.5."""
    rows = torch.tensor(advantages)
    mask = torch.ones(len(delta), len(delta[0]), dtype=torch.bool)
    verdicts = torch.full((len(delta),), correct)
    return statistics.delta_metrics(torch.tensor(delta), rows, mask, verdicts, mixing=0.5)


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
    old = torch.full((8, 1), -1.0)
    batch = token_batch(correct.float().tolist(), ids.tolist(), lengths=[1] * 8, old=old, views={})
    values = results(statistics.group_metrics(batch))
    expected = {"all_right": 0.25, "all_wrong": 0.25, "mixed": 0.5, "flat_rollouts": 0.5}
    assert values == {f"groups/{name}": value for name, value in expected.items()}


def test_shapes_of_the_core_are_checked_in_tests() -> None:
    with pytest.raises(TypeCheckError):
        statistics.over_response(torch.zeros(3), torch.ones(2, 4, dtype=torch.bool))


def batch_of(rewards: list[float], group_ids: list[int], lengths: list[int] | None = None) -> TokenBatch:
    """Responses of one token each unless lengths are given."""
    sizes = lengths or [1] * len(rewards)
    return token_batch(rewards, group_ids, lengths=sizes, old=torch.full((len(rewards), max(sizes)), -1.0), views={})


def signal_of(name: str, batch: TokenBatch, **config: Any) -> TokenSignal:
    return build_estimator(name, config).signal(batch, step=0)


def advantages_of(name: str, rewards: list[float], group_ids: list[int], **config: Any) -> list[float]:
    return signal_of(name, batch_of(rewards, group_ids), **config).advantages[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "ids", "settings", "expected"),
    [
        ("rloo", [1.0, 0.0, 0.5], [0, 0, 0], {}, [1 - 0.25, 0 - 0.75, 0.5 - 0.5]),
        ("rloo", [1.0, 0.0, 0.0, 0.0], [3, 8, 3, 8], {}, [1.0, 0.0, -1.0, 0.0]),
        # The first group's deviation and margin are 0.5; the second has two best rollouts.
        ("grpo_passk", [1.0, 0.5, 0.0, 0.9, 0.9, 0.1], [0, 0, 0, 1, 1, 1], {}, [0.5 / (0.5 + 1e-6), *[0.0] * 5]),
        ("grpo_passk", [1.0, 0.5, 0.0], [0, 0, 0], {"advantage": {"scale": "none"}}, [0.5, 0.0, 0.0]),
    ],
)
def test_advantages_of_groups_are_those_worked_out_by_hand(
    name: str, rewards: list[float], ids: list[int], settings: dict[str, Any], expected: list[float]
) -> None:
    assert advantages_of(name, rewards, ids, **settings) == pytest.approx(expected)


@given(rewards=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=8))
def test_rloo_is_n_over_n_minus_1_times_the_centred_reward(rewards: list[float]) -> None:
    size = len(rewards)
    plain = torch.tensor(advantages_of("grpo", rewards, [0] * size, advantage={"scale": "none"}), dtype=torch.float64)
    actual = torch.tensor(advantages_of("rloo", rewards, [0] * size), dtype=torch.float64)
    torch.testing.assert_close(actual, plain * size / (size - 1), rtol=1e-6, atol=1e-6)


def test_passk_keeps_only_single_best_rows_alive() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.9, 0.9, 0.5, 0.5])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert build_estimator("grpo_passk").live_rows(rewards, groups, {}).tolist() == [False, True] + [False] * 4


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_equal_rewards_teach_nothing_and_one_rollout_is_refused(name: str) -> None:
    for reward, size in itertools.product((0.0, 0.1, 0.7, 0.9, 1.0), range(2, 33)):
        assert advantages_of(name, [reward] * size, [0] * size) == [0.0] * size
    assert "group_ids" in build_estimator(name).reads
    with pytest.raises(ConfigError, match=r"worker\.rollout\.n is 1 .* at least 2"):
        advantages_of(name, [1.0, 0.0, 1.0], [0, 0, 1])


def test_returns_with_gamma_one_half_halve_at_each_step() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0], [0.5, 1.0, 9.0, 9.0]])
    actual = generalised_advantages(rewards, torch.zeros(2, 4), response_mask([3, 2], 4), gamma=0.5, gae_lambda=1.0)
    assert actual[0].tolist() == [[0.25, 0.5, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]


def test_reinforce_plus_plus_whitens_returns_over_the_batch() -> None:
    """The case has the returns 1, 1, 0, 0, 0 of the batch's five tokens."""
    # Mean 0.4, unbiased variance 1.2 / 4 = 0.3.
    signal = signal_of("reinforce_plus_plus", batch_of([1.0, 0.0], [0, 1], [2, 3]))
    high = 0.6 / math.sqrt(0.3)
    low = -0.4 / math.sqrt(0.3)
    assert signal.advantages[0].tolist() == pytest.approx([high, high, 0.0])
    assert signal.advantages[1].tolist() == pytest.approx([low, low, low])
    assert signal.returns is None
    # With gamma 0 the returns are 0, 1 and 0: mean 1/3, unbiased variance 1/3.
    last = signal_of("reinforce_plus_plus", batch_of([1.0, 0.0], [0, 1], [2, 1]), gamma=0.0)
    assert last.advantages[0].tolist() == pytest.approx([-1 / 3 * math.sqrt(3), 2 / 3 * math.sqrt(3)], rel=1e-6)


def test_equal_returns_whiten_to_exactly_0() -> None:
    for reward in (0.1, 0.7, 0.9):
        signal = signal_of("reinforce_plus_plus", batch_of([reward] * 7, list(range(7)), [3, 1, 4, 1, 5, 9, 2]))
        assert torch.count_nonzero(signal.advantages) == 0
    assert whitened(torch.tensor([[5.0]]), torch.tensor([[True]])).tolist() == [[0.0]]
    smallest_difference = whitened(torch.tensor([[0.0, 1e-6]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    assert torch.count_nonzero(smallest_difference) == 2


def test_remax_is_the_reward_above_the_greedy_one_on_every_token() -> None:
    batch = dataclasses.replace(
        batch_of([1.0, 0.0, 0.5], [0, 0, 1], [1, 3, 2]), reward_baselines=torch.tensor([0.25, 0.25, 1.0])
    )
    estimator = build_estimator("remax")
    assert estimator.reads == ("reward_baselines",)
    signal = estimator.signal(batch, step=0)
    assert signal.advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25], [-0.5, -0.5, 0.0]]
    assert results(signal.metrics)["baseline/greedy_reward"] == 0.5
    with pytest.raises(AssertionError, match="reads reward_baselines"):
        estimator.signal(dataclasses.replace(batch, reward_baselines=None), step=0)


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        # Errors: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75.
        (1.0, 0.0, [-0.25, 0.5, 0.25]),
        (1.0, 1.0, [0.5, 0.75, 0.25]),
        (1.0, 0.5, [-0.25 + 0.5 * 0.625, 0.5 + 0.5 * 0.25, 0.25]),
        # Errors: 0.125 - 0.5, 0.375 - 0.25, 1 - 0.75; each later one counts a half of a half.
        (0.5, 0.5, [-0.375 + 0.25 * (0.125 + 0.25 * 0.25), 0.125 + 0.25 * 0.25, 0.25]),
    ],
)
def test_gae_of_three_tokens_is_that_worked_out_by_hand(gamma: float, gae_lambda: float, expected: list[float]) -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0]])
    values = torch.tensor([[0.5, 0.25, 0.75, 9.0]])
    advantages, returns = generalised_advantages(
        rewards, values, response_mask([3], 4), gamma=gamma, gae_lambda=gae_lambda
    )
    assert advantages[0].tolist() == [*expected, 0.0]
    assert returns[0].tolist() == [*(a + v for a, v in zip(expected, [0.5, 0.25, 0.75], strict=True)), 0.0]


@given(seed=st.integers(0, 1000), gamma=st.floats(0, 1))
def test_with_lambda_1_critic_targets_are_discounted_returns(seed: int, gamma: float) -> None:
    rewards, values = log_probs_like((2, 3, 5), seed)
    mask = response_mask([5, 2, 3])
    _, targets = generalised_advantages(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    returns, _ = generalised_advantages(rewards, torch.zeros_like(values), mask, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(targets, returns, rtol=1e-10, atol=1e-10)


def test_gae_whitens_advantages_and_not_the_critics_targets() -> None:
    batch = dataclasses.replace(
        batch_of([1.0, 0.0], [0, 1], [3, 2]), values=torch.tensor([[0.5, 0.25, 0.75], [0.5] * 3])
    )
    assert "values" in build_estimator("gae").reads
    signal = signal_of("gae", batch)
    # Advantages 0.5, 0.75, 0.25 and -0.5, -0.5: mean 0.1, squared distances .16 .4225 .0225 .36 .36, variance 1.325 / 4.
    deviation = math.sqrt(1.325 / 4)
    expected = [[0.4, 0.65, 0.15], [-0.6, -0.6, 0.0]]
    for row, wanted in zip(signal.advantages.tolist(), expected, strict=True):
        assert row == pytest.approx([value / deviation for value in wanted], rel=1e-6)
    assert signal.returns is not None
    assert signal.returns.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    actual = results(signal.metrics)
    assert actual["critic/returns"] == pytest.approx(0.6)
    assert actual["critic/squared_error"] == pytest.approx((0.25 + 0.5625 + 0.0625 + 0.25 + 0.25) / 5)
    with pytest.raises(AssertionError, match="reads values"):
        signal_of("gae", dataclasses.replace(batch, values=None))
