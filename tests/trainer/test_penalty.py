"""The KL as a part of the reward, in numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from cepo.config.schema import AlgorithmConfig
from cepo.metrics import results
from cepo.rollout.base import Generation
from cepo.trainer.penalty import penalise
from cepo.trainer.rollouts import RolloutBatch
from cepo.trainer.state import TrainerState

LOG2 = math.log(2)


def scored_batch(reference: list[list[float]]) -> RolloutBatch:
    """Two responses of 2 and 1 tokens to one prompt, with rewards 1 and 0; every token has probability 1/2."""
    generations = [Generation(response_ids=(1,) * size, log_probs=(-LOG2,) * size, finished=True) for size in (2, 1)]
    batch = RolloutBatch(step=0, problems=cast("Any", [None]), prompts=cast("Any", [None]), generations=generations)
    batch.rewards = torch.tensor([1.0, 0.0])
    batch.old_log_probs = torch.tensor([[-LOG2, -LOG2], [-LOG2, 0.0]])
    batch.reference_log_probs = torch.tensor(reference)
    return batch


def test_each_token_loses_the_coefficient_times_its_kl_and_the_last_one_keeps_the_reward_beside_it() -> None:
    batch = scored_batch([[-2 * LOG2, -LOG2], [-3 * LOG2, 7.0]])
    state = TrainerState(kl_coefficient=0.1)
    metrics = results(penalise(batch, AlgorithmConfig(kl_penalty="kl"), state))
    # KL: log 2, 0 and 2 log 2; the 7 stands on padding.
    assert batch.penalised_rewards is not None
    torch.testing.assert_close(
        batch.penalised_rewards, torch.tensor([[-0.1 * LOG2, 1.0], [-0.2 * LOG2, 0.0]]), atol=1e-7, rtol=0
    )
    assert metrics == {"critic/kl": pytest.approx(LOG2), "critic/kl_coef": 0.1}
    assert state.kl_coefficient == 0.1
    # What the estimator sees is each response's sum.
    torch.testing.assert_close(batch.token_batch().rewards, torch.tensor([1.0 - 0.1 * LOG2, -0.2 * LOG2]))


def test_a_policy_nearer_to_the_reference_earns_more() -> None:
    near, far = scored_batch([[-LOG2] * 2, [-LOG2] * 2]), scored_batch([[-2 * LOG2] * 2, [-2 * LOG2] * 2])
    for batch in (near, far):
        penalise(batch, AlgorithmConfig(kl_penalty="kl"), TrainerState(kl_coefficient=0.1))
    assert bool((near.token_batch().rewards > far.token_batch().rewards).all())


def test_an_adaptive_coefficient_follows_the_mean_over_tokens_after_it_was_used() -> None:
    batch = scored_batch([[-2 * LOG2, -LOG2], [-3 * LOG2, 0.0]])
    state = TrainerState(kl_coefficient=0.1)
    algorithm = AlgorithmConfig(kl_penalty="kl", kl_type="adaptive", kl_target=LOG2 / 1.1, kl_horizon=20.0)
    assert results(penalise(batch, algorithm, state))["critic/kl_coef"] == 0.1
    # A tenth too far, 2 sequences of a horizon of 20: 1 % more.
    assert state.kl_coefficient == pytest.approx(0.1 * 1.01)


def test_a_kl_over_the_vocabulary_is_taken_where_it_was_measured() -> None:
    batch = scored_batch([[0.0, 0.0], [0.0, 0.0]])
    batch.reference_divergence = torch.tensor([[0.5, 1.0], [2.0, 9.0]])
    metrics = results(penalise(batch, AlgorithmConfig(kl_penalty="full"), TrainerState(kl_coefficient=0.1)))
    assert metrics["critic/kl"] == pytest.approx(3.5 / 3)
    assert batch.penalised_rewards is not None
    torch.testing.assert_close(batch.penalised_rewards, torch.tensor([[-0.05, 0.9], [-0.2, 0.0]]))


def test_a_kl_in_the_loss_is_measured_and_leaves_the_rewards_alone() -> None:
    batch = scored_batch([[-2 * LOG2, -LOG2], [-3 * LOG2, 0.0]])
    state = TrainerState(kl_coefficient=0.1)
    metrics = results(penalise(batch, AlgorithmConfig(kl_penalty="kl", use_kl_loss=True), state))
    assert metrics == {"critic/kl": pytest.approx(LOG2)}
    assert batch.penalised_rewards is None
    assert batch.token_batch().rewards.tolist() == [1.0, 0.0]
