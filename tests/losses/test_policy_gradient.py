"""The policy loss: its gradient in the logits, its clips, and its independence of how the batch is cut."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from factories import log_probs_like, outcome_rewards, response_mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cepo.algorithms import build_estimator
from cepo.losses.objective import (
    AGGREGATIONS,
    LOSS_TYPES,
    LossDenominators,
    ObjectiveSettings,
    policy_loss,
    token_weights,
)
from cepo.types import TokenBatch

SETTINGS = ObjectiveSettings(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=3.0)
VOCABULARY = 7
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])
LENGTHS = [3, 6, 2, 5]  # 16 tokens


def sampled_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def cepo_signal(old: Tensor, correct: Tensor, wrong: Tensor) -> Tensor:
    mask = response_mask(LENGTHS)
    batch = TokenBatch(
        token_level_rewards=outcome_rewards(REWARDS.to(old.dtype), mask),
        response_mask=mask,
        old_log_probs=old.detach(),
        group_ids=torch.zeros(4, dtype=torch.int64),
        teacher_log_probs={"correct": correct, "wrong": wrong},
        correct=REWARDS > 0.5,
    )
    return build_estimator("cepo").signal(batch, step=0).advantages


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student logits, two teachers' logits and sampled tokens for the four rows, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 6, VOCABULARY)
    logits, correct, wrong = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits, correct, wrong, torch.randint(VOCABULARY, (4, 6), generator=generator)


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, settings: ObjectiveSettings = SETTINGS) -> Tensor:
    return policy_loss(log_probs, old, advantages, torch.ones_like(old, dtype=torch.bool), settings)


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 2.0))
def test_at_ratio_1_the_gradient_is_minus_a_times_onehot_minus_p(seed: int, temperature: float) -> None:
    """Teachers receive none."""
    logits, correct, wrong, tokens = random_case(seed)
    for tensor in (logits, correct, wrong):
        tensor.requires_grad_()
    log_probs, *views = (sampled_log_probs(each, tokens, temperature) for each in (logits, correct, wrong))
    advantages = cepo_signal(log_probs, *views)
    weights = token_weights(response_mask(LENGTHS), "token", LossDenominators(16, 4, 6))
    (clipped_loss(log_probs, log_probs.detach(), advantages) * weights).sum().backward()
    onehot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
    probabilities = torch.softmax(logits.detach() / temperature, dim=-1)
    expected = -advantages.detach().unsqueeze(-1) * (onehot - probabilities) / (temperature * 16)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-10, atol=1e-12)
    assert torch.count_nonzero(expected) == 16 * VOCABULARY
    assert correct.grad is None
    assert wrong.grad is None


def one_token(ratio: float, advantage: float, settings: ObjectiveSettings) -> tuple[float, float]:
    """Loss and its derivative in the log-prob of a single token."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = clipped_loss(log_probs, torch.zeros_like(log_probs), torch.full_like(log_probs, advantage), settings)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return float(loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # clipped above at 1.28
        (0.5, 2.0, -1.0, -1.0),  # a positive advantage is not clipped below
        (0.5, -2.0, 1.6, 0.0),  # clipped below at 0.8
        (2.0, -2.0, 4.0, 4.0),  # a negative advantage is not clipped above,
        (4.0, -2.0, 6.0, 0.0),  # until the dual bound 3 |A|
        (4.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_losses_and_gradients_worked_out_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert one_token(ratio, advantage, SETTINGS) == pytest.approx((loss, gradient), abs=1e-12)
    if ratio == 4.0:
        undual = dataclasses.replace(SETTINGS, clip_ratio_dual=None)
        assert one_token(ratio, advantage, undual) == pytest.approx((-4.0 * advantage, -4.0 * advantage))


def test_weights_of_each_aggregation_are_worked_out_by_hand() -> None:
    """The sequences have lengths 1 and 3."""
    mask, denominators = response_mask([1, 3], width=4), LossDenominators(4, 2, 8)
    expected = {
        "token": [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]],
        "seq": [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]],
        "seq_sum": [[1 / 2, 0, 0, 0], [1 / 2, 1 / 2, 1 / 2, 0]],
        "constant": [[1 / 16, 0, 0, 0], [1 / 16, 1 / 16, 1 / 16, 0]],
    }
    assert set(expected) == set(AGGREGATIONS)
    for name, weights in expected.items():
        torch.testing.assert_close(token_weights(mask, name, denominators), torch.tensor(weights))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(seed=st.integers(0, 10_000), dead=st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_losses_depend_on_no_micro_batch_padding_or_dead_row(
    loss_type: str, aggregation: str, seed: int, dead: set[int]
) -> None:
    """Leaving out rows without advantage changes no bit."""
    log_probs, old = log_probs_like((2, 4, 6), seed, scale=0.3)
    advantages = torch.tensor([0.9, -0.9, 0.4, -1.3], dtype=torch.float64).unsqueeze(1).repeat(1, 6)
    advantages[sorted(dead)] = 0.0

    def total(parts: list[list[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        leaf = log_probs.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            mask = response_mask([LENGTHS[row] for row in rows], 6 + padding)
            padded = [
                torch.nn.functional.pad(tensor[rows], (0, padding), value=-7.0) for tensor in (leaf, old, advantages)
            ]
            weights = token_weights(mask, aggregation, LossDenominators(16, 4, 6)).double()
            losses = policy_loss(*padded, mask, dataclasses.replace(SETTINGS, loss_type=loss_type))
            loss = loss + (losses * weights).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    whole, one_by_one = total([[0, 1, 2, 3]]), total([[0], [1], [2], [3]])
    for found in (one_by_one, total([[3, 1], [0, 2]]), total([[0, 1, 2, 3]], padding=5)):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)
    without_dead = total([[row] for row in range(4) if row not in dead])
    assert all(torch.equal(one, other) for one, other in zip(without_dead, one_by_one, strict=True))
