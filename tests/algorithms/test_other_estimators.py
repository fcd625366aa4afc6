"""EasyR1's other estimators against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from factories import log_probs_like, response_mask, token_batch
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator
from cepo.algorithms.credit import generalised_advantages, whitened
from cepo.errors import ConfigError
from cepo.metrics import results
from cepo.types import TokenBatch, TokenSignal


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
    found = torch.tensor(advantages_of("rloo", rewards, [0] * size), dtype=torch.float64)
    torch.testing.assert_close(found, plain * size / (size - 1), rtol=1e-6, atol=1e-6)


def test_passk_keeps_only_single_best_rows_alive() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.9, 0.9, 0.5, 0.5]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert build_estimator("grpo_passk").live_rows(rewards, groups).tolist() == [False, True] + [False] * 4


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_equal_rewards_teach_nothing_and_one_rollout_is_refused(name: str) -> None:
    for reward, size in itertools.product((0.0, 0.1, 0.7, 0.9, 1.0), range(2, 33)):
        assert advantages_of(name, [reward] * size, [0] * size) == [0.0] * size
    assert build_estimator(name).needs_group
    with pytest.raises(ConfigError, match=r"worker\.rollout\.n is 1 .* at least 2"):
        advantages_of(name, [1.0, 0.0, 1.0], [0, 0, 1])


def test_returns_with_gamma_one_half_halve_at_each_step() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0], [0.5, 1.0, 9.0, 9.0]])
    found = generalised_advantages(rewards, torch.zeros(2, 4), response_mask([3, 2], 4), gamma=0.5, gae_lambda=1.0)
    assert found[0].tolist() == [[0.25, 0.5, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]


def test_reinforce_plus_plus_whitens_returns_over_the_batch() -> None:
    """The case has the returns 1, 1, 0, 0, 0 of the batch's five tokens."""
    # Mean 0.4, unbiased variance 1.2 / 4 = 0.3.
    signal = signal_of("reinforce_plus_plus", batch_of([1.0, 0.0], [0, 1], [2, 3]))
    high, low = 0.6 / math.sqrt(0.3), -0.4 / math.sqrt(0.3)
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
    assert estimator.needs_baseline
    assert not estimator.needs_group
    signal = estimator.signal(batch, step=0)
    assert signal.advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25], [-0.5, -0.5, 0.0]]
    assert results(signal.metrics)["baseline/greedy_reward"] == 0.5
    with pytest.raises(AssertionError, match="needs_baseline"):
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
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 9.0]]), torch.tensor([[0.5, 0.25, 0.75, 9.0]])
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
    assert build_estimator("gae").needs_values
    signal = signal_of("gae", batch)
    # Advantages 0.5, 0.75, 0.25 and -0.5, -0.5: mean 0.1, squared distances .16 .4225 .0225 .36 .36, variance 1.325 / 4.
    deviation = math.sqrt(1.325 / 4)
    expected = [[0.4, 0.65, 0.15], [-0.6, -0.6, 0.0]]
    for row, wanted in zip(signal.advantages.tolist(), expected, strict=True):
        assert row == pytest.approx([value / deviation for value in wanted], rel=1e-6)
    assert signal.returns is not None
    assert signal.returns.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    found = results(signal.metrics)
    assert found["critic/returns"] == pytest.approx(0.6)
    assert found["critic/squared_error"] == pytest.approx((0.25 + 0.5625 + 0.0625 + 0.25 + 0.25) / 5)
    with pytest.raises(AssertionError, match="needs_values"):
        signal_of("gae", dataclasses.replace(batch, values=None))
