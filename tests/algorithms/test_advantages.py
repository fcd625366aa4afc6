"""Advantages of groups and of EasyR1's other estimators, the evidence kernel and metrics, against numbers by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from factories import advantages_of, response_mask, signal_of, token_batch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from cepo.algorithms import build_estimator, statistics
from cepo.algorithms.statistics import generalised_advantages, whitened
from cepo.errors import ConfigError
from cepo.metrics import Metrics, mean_value, results
from cepo.types import TokenBatch


def test_an_advantage_below_1e_6_has_sign_0() -> None:
    signs = statistics.advantage_sign(torch.tensor([-2.0, -9e-7, 0.0, 9e-7, 2e-6]))
    assert signs.tolist() == [-1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_group_is_live_from_a_range_of_a_millionth_on() -> None:
    rewards = torch.tensor([0.0, 1e-6, 0.0, 0.9e-6, 0.5, 0.5], dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 1, 1, 2, 2])
    live = statistics.live_rows(rewards, group_ids)
    assert live.tolist() == [True, True, False, False, False, False]


def test_metrics_of_delta_count_tokens_of_rows_with_an_advantage() -> None:
    """The deltas 1, -0.5, 0 at A > 0 and 2, 1 at A < 0 count; sign * delta is 1, -0.5, 0, -2, -1."""
    delta = torch.tensor([[1.0, -0.5, 0.0, 9.0], [2.0, 1.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    mask = response_mask([3, 2, 4])
    advantages = torch.tensor([1.0, -1.0, 0.0])
    correct = torch.tensor([True, False, True])
    values = results(statistics.delta_metrics(delta, advantages, mask, correct, mixing=0.25))
    assert values["evidence/lambda"] == 0.25
    assert values["evidence/positive_fraction"] == pytest.approx(3 / 5)
    assert values["evidence/negative_fraction"] == pytest.approx(1 / 5)
    assert values["evidence/disagreement_rate"] == pytest.approx(3 / 5)
    assert values["evidence/delta_mean_right"] == pytest.approx(0.5 / 3)
    assert values["evidence/delta_mean_wrong"] == pytest.approx(1.5)
    assert values["evidence/delta_mean_positive_advantage"] == pytest.approx(0.5 / 3)
    assert values["evidence/delta_mean_negative_advantage"] == pytest.approx(1.5)
    assert values["evidence/delta_std_wrong"] == pytest.approx(math.sqrt(0.5))


def metrics_of(rows: list[list[float]], advantages: list[float], *, correct: bool) -> Metrics:
    """Metrics of the delta of responses without padding, all right or all wrong, under lambda 0.5."""
    delta = torch.tensor(rows)
    mask = torch.ones_like(delta, dtype=torch.bool)
    verdicts = torch.full((len(rows),), correct)
    return statistics.delta_metrics(delta, torch.tensor(advantages), mask, verdicts, mixing=0.5)


def test_the_spread_of_one_delta_adds_nothing_to_a_mean() -> None:
    metrics = metrics_of([[1.0]], [1.0], correct=True)
    of_another_rank = mean_value(0.5, 3.0)
    for name in ("evidence/delta_std_right", "evidence/delta_std_wrong"):
        assert metrics[name].result is None
        assert metrics[name].merge(of_another_rank).result == 0.5


def test_evidence_counts_above_a_thousandth_of_a_nat() -> None:
    values = results(metrics_of([[0.0011, 0.0009, -0.0011, -0.0009]], [1.0], correct=True))
    assert values["evidence/positive_fraction"] == 0.25
    assert values["evidence/negative_fraction"] == 0.25
    assert values["evidence/disagreement_rate"] == 0.25


def test_right_and_wrong_is_the_verdict_not_the_advantage() -> None:
    """A wrong rollout with an advantage above 0, such as by a bonus, still counts as wrong."""
    metrics = metrics_of([[1.0], [3.0], [5.0]], [1.15, -0.58, -0.58], correct=False)
    values = results(metrics)
    assert "evidence/delta_mean_right" not in values
    assert values["evidence/delta_mean_wrong"] == pytest.approx(3.0)


def test_group_metrics_are_shares_of_four_groups() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    batch = batch_of(rewards, [0, 0, 1, 1, 2, 2, 3, 3])
    values = results(statistics.group_metrics(batch))
    assert values == {
        "groups/all_right": 0.25,
        "groups/all_wrong": 0.25,
        "groups/mixed": 0.5,
        "groups/flat_rollouts": 0.5,
    }


def test_shapes_of_the_core_are_checked_in_tests() -> None:
    with pytest.raises(TypeCheckError):
        statistics.over_response(torch.zeros(3), torch.ones(2, 4, dtype=torch.bool))


def batch_of(rewards: list[float], group_ids: list[int], lengths: list[int] | None = None) -> TokenBatch:
    """Responses of one token each unless lengths are given; those of reward 1 are right."""
    lengths = lengths or [1] * len(rewards)
    old = torch.full((len(rewards), max(lengths)), -1.0)
    return token_batch(rewards, group_ids, lengths=lengths, old=old, views={})


@given(rewards=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=8))
def test_rloo_is_n_over_n_minus_1_times_the_centred_reward(rewards: list[float]) -> None:
    size = len(rewards)
    batch = batch_of(rewards, [0] * size)
    plain = advantages_of("grpo", batch, advantage={"scale": "none"})
    actual = advantages_of("rloo", batch)
    torch.testing.assert_close(actual, plain * size / (size - 1), rtol=1e-6, atol=1e-6)


def test_passk_keeps_only_single_best_rows_alive() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.9, 0.9, 0.5, 0.5])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    live = build_estimator("grpo_passk").live_rows(rewards, groups, {})
    assert live.tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_equal_rewards_teach_nothing_and_one_rollout_is_refused(name: str) -> None:
    for reward in (0.0, 0.1, 0.7, 0.9, 1.0):
        for size in range(2, 33):
            batch = batch_of([reward] * size, [0] * size)
            advantages = advantages_of(name, batch)
            assert torch.count_nonzero(advantages) == 0
    assert "group_ids" in build_estimator(name).reads
    one_rollout = batch_of([1.0, 0.0, 1.0], [0, 0, 1])
    with pytest.raises(ConfigError, match=r"worker\.rollout\.n is 1 .* at least 2"):
        advantages_of(name, one_rollout)


def test_returns_with_gamma_one_half_halve_at_each_step() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0], [0.5, 1.0, 9.0, 9.0]])
    mask = response_mask([3, 2], width=4)
    returns, _ = generalised_advantages(rewards, torch.zeros(2, 4), mask, gamma=0.5, gae_lambda=1.0)
    assert returns.tolist() == [[0.25, 0.5, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]


def test_reinforce_plus_plus_whitens_returns_over_the_batch() -> None:
    """The case has the returns 1, 1, 0, 0, 0 of the batch's five tokens: mean 0.4, unbiased variance 1.2 / 4 = 0.3."""
    batch = batch_of([1.0, 0.0], [0, 1], lengths=[2, 3])
    signal = signal_of("reinforce_plus_plus", batch)
    high = 0.6 / math.sqrt(0.3)
    low = -0.4 / math.sqrt(0.3)
    assert signal.advantages[0].tolist() == pytest.approx([high, high, 0.0])
    assert signal.advantages[1].tolist() == pytest.approx([low, low, low])
    assert signal.returns is None


def test_with_gamma_0_reinforce_plus_plus_rewards_the_last_token() -> None:
    """The returns are 0, 1 and 0: mean 1/3, unbiased variance 1/3."""
    batch = batch_of([1.0, 0.0], [0, 1], lengths=[2, 1])
    advantages = advantages_of("reinforce_plus_plus", batch, gamma=0.0)
    assert advantages[0].tolist() == pytest.approx([-1 / math.sqrt(3), 2 / math.sqrt(3)], rel=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.7, 0.9])
def test_equal_returns_whiten_to_exactly_0(reward: float) -> None:
    batch = batch_of([reward] * 7, list(range(7)), lengths=[3, 1, 4, 1, 5, 9, 2])
    advantages = advantages_of("reinforce_plus_plus", batch)
    assert torch.count_nonzero(advantages) == 0


def test_one_token_whitens_to_0_a_difference_of_1e_minus_6_not() -> None:
    one_token = torch.tensor([[5.0]])
    assert whitened(one_token, torch.tensor([[True]])).tolist() == [[0.0]]
    smallest_difference = torch.tensor([[0.0, 1e-6]], dtype=torch.float64)
    of_difference = whitened(smallest_difference, torch.tensor([[True, True]]))
    assert torch.count_nonzero(of_difference) == 2


def test_remax_is_the_reward_above_the_greedy_one_on_every_token() -> None:
    batch = batch_of([1.0, 0.0, 0.5], [0, 0, 1], lengths=[1, 3, 2])
    batch = dataclasses.replace(batch, reward_baselines=torch.tensor([0.25, 0.25, 1.0]))
    estimator = build_estimator("remax")
    assert estimator.reads == ("reward_baselines",)
    signal = estimator.signal(batch, step=0)
    above_the_greedy = [
        [0.75, 0.0, 0.0],
        [-0.25, -0.25, -0.25],
        [-0.5, -0.5, 0.0],
    ]
    assert signal.advantages.tolist() == above_the_greedy
    assert results(signal.metrics)["baseline/greedy_reward"] == 0.5
    without_baselines = dataclasses.replace(batch, reward_baselines=None)
    with pytest.raises(AssertionError, match="reads reward_baselines"):
        estimator.signal(without_baselines, step=0)


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
    mask = response_mask([3], width=4)
    advantages, returns = generalised_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    assert advantages[0].tolist() == [*expected, 0.0]
    assert returns[0].tolist() == [expected[0] + 0.5, expected[1] + 0.25, expected[2] + 0.75, 0.0]


def test_gae_reads_the_critics_values() -> None:
    batch = dataclasses.replace(batch_of([1.0, 0.0], [0, 1]), values=None)
    assert "values" in build_estimator("gae").reads
    with pytest.raises(AssertionError, match="reads values"):
        signal_of("gae", batch)
