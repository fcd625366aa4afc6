"""The KL as a part of the reward, in numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.losses.objective import kl_penalty
from cepo.metrics import results
from cepo.trainer.checkpoints import TrainerState
from cepo.trainer.loop import penalise

LOG2 = math.log(2)
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
"""Two responses of 2 and 1 tokens, with rewards 1 and 0."""
MASK = torch.tensor([[True, True], [True, False]])


def kl_from(reference: list[list[float]]) -> Tensor:
    """The KL `x - y` of the two responses, whose every token has probability 1/2."""
    return kl_penalty(torch.tensor([[-LOG2, -LOG2], [-LOG2, 0.0]]), torch.tensor(reference), "kl")


def test_each_token_loses_the_coefficient_times_its_kl() -> None:
    # KL: log 2, 0 and 2 log 2; the 7 stands on padding.
    penalties, state = kl_from([[-2 * LOG2, -LOG2], [-3 * LOG2, 7.0]]), TrainerState(kl_coefficient=0.1)
    penalised, metrics = penalise(REWARDS, penalties, MASK, AlgorithmConfig(kl_penalty="kl"), state)
    expected = torch.tensor([[-0.1 * LOG2, 1.0], [-0.2 * LOG2, 0.0]])
    torch.testing.assert_close(penalised, expected, atol=1e-7, rtol=0)
    assert results(metrics) == {"critic/kl": pytest.approx(LOG2), "critic/kl_coef": 0.1}
    assert state.kl_coefficient == 0.1


def test_an_adaptive_coefficient_follows_the_mean_over_tokens() -> None:
    state = TrainerState(kl_coefficient=0.1)
    algorithm = AlgorithmConfig(kl_penalty="kl", kl_type="adaptive", kl_target=LOG2 / 1.1, kl_horizon=20.0)
    _, metrics = penalise(REWARDS, kl_from([[-2 * LOG2, -LOG2], [-3 * LOG2, 0.0]]), MASK, algorithm, state)
    assert results(metrics)["critic/kl_coef"] == 0.1
    # A tenth too far, 2 sequences of a horizon of 20: 1 % more.
    assert state.kl_coefficient == pytest.approx(0.1 * 1.01)


def test_a_kl_over_the_vocabulary_is_taken_where_it_was_measured() -> None:
    penalties, state = torch.tensor([[0.5, 1.0], [2.0, 9.0]]), TrainerState(kl_coefficient=0.1)
    penalised, metrics = penalise(REWARDS, penalties, MASK, AlgorithmConfig(kl_penalty="full"), state)
    assert results(metrics)["critic/kl"] == pytest.approx(3.5 / 3)
    torch.testing.assert_close(penalised, torch.tensor([[-0.05, 0.9], [-0.2, 0.0]]))


def test_a_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    algorithm = AlgorithmConfig(kl_penalty="kl", use_kl_loss=True)
    penalties = kl_from([[-2 * LOG2, -LOG2], [-3 * LOG2, 0.0]])
    rewards, metrics = penalise(REWARDS, penalties, MASK, algorithm, TrainerState(kl_coefficient=0.1))
    assert results(metrics) == {"critic/kl": pytest.approx(LOG2)}
    assert torch.equal(rewards, REWARDS)
