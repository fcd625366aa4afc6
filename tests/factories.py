"""Groups of rollouts and token batches for tests, with the few things a test varies as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from cepo.algorithms import Estimator, build_estimator
from cepo.algorithms.teacher_contexts import teacher_contexts_of
from cepo.algorithms.visual import Visual
from cepo.rollout.generator import Generation
from cepo.trainer.rollouts import Rollouts
from cepo.types import ImageReference, Reference, Rollout, RolloutGroup, TokenBatch, TokenSignal

THREE_GROUPS: dict[str, Any] = {
    "rewards": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "group_ids": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    "lengths": [7, 3, 1, 5, 7, 2, 6, 4, 3, 7, 5, 1],
}


def rollout(
    index: int,
    reward: float,
    answer: str | None,
    *,
    correct: bool = False,
    equal: bool | None = None,
    ids: Sequence[int] = (1, 2, 3),
) -> Rollout:
    """One rollout; its answer equals the ground truth exactly where it is correct, unless `equal` says otherwise."""
    return Rollout(
        index=index,
        reward=reward,
        correct=correct,
        response_ids=torch.tensor(list(ids), dtype=torch.int32),
        answer=answer,
        answer_equals_ground_truth=correct if equal is None else equal,
    )


def group(
    *rollouts: Rollout, ground_truth: str = "70", seed: int = 1, step: int = 0, prompt: str = "p"
) -> RolloutGroup:
    """A group in the order given."""
    return RolloutGroup(prompt_id=prompt, ground_truth=ground_truth, rollouts=rollouts, seed=seed, step=step)


def rollouts_of(tokens: Sequence[Sequence[int]], rewards: Sequence[float] | None = None, **options: Any) -> Rollouts:
    """Responses of these tokens to one prompt, with log-probs of 0, right where the reward is 1; options replace fields."""
    rewards = [0.0] * len(tokens) if rewards is None else [float(reward) for reward in rewards]
    fields: dict[str, Any] = {
        "step": 0,
        "problems": cast("Any", [None]),
        "prompts": cast("Any", [None]),
        "generations": [Generation.of(token_ids, [0.0] * len(token_ids), finished=True) for token_ids in tokens],
        "responses": [""] * len(tokens),
        "scores": [{"overall": reward} for reward in rewards],
        "correct": torch.tensor(rewards) == 1.0,
    }
    return Rollouts(**fields | options)


def settled_references(estimator: Estimator, these: RolloutGroup) -> dict[str, list[Reference | None]]:
    """What the teachers of each view read, if every chosen reference can be shown."""
    readings = teacher_contexts_of(
        estimator,
        [these],
        torch.ones(len(these.rollouts), dtype=torch.bool),
        lambda row, reference: reference,
        rewards=torch.tensor([rollout.reward for rollout in these.rollouts]),
        group_ids=torch.zeros(len(these.rollouts), dtype=torch.int64),
    )
    return {view: list(references) for view, references in readings.shown.items()}


def outcome_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T): each rollout's reward on its last response token."""
    token_level = torch.zeros(mask.shape, dtype=rewards.dtype)
    token_level[torch.arange(len(rewards)), mask.sum(dim=1) - 1] = rewards
    return token_level


def response_mask(lengths: Sequence[int], width: int | None = None) -> Tensor:
    """(B, T) bool, True on the first `lengths[i]` tokens of row i."""
    return torch.arange(width or max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)


def token_batch(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    lengths: Sequence[int],
    old: Tensor,
    views: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> TokenBatch:
    """A batch whose rollouts are correct where their reward is at least 0.5; log-probs are cast to `dtype`.

    Every row has a reference for every view, the greedy responses have reward 0.25, the critic says something in (-1, 0].
    """
    mask = response_mask(lengths, old.shape[1])
    outcomes = torch.tensor(rewards, dtype=dtype)
    return TokenBatch(
        token_level_rewards=outcome_rewards(outcomes, mask),
        response_mask=mask,
        old_log_probs=old.to(dtype),
        group_ids=torch.tensor(group_ids),
        teacher_log_probs={name: view.to(dtype) for name, view in views.items()},
        correct=outcomes >= 0.5,
        has_reference={name: torch.ones(len(rewards), dtype=torch.bool) for name in views},
        reward_baselines=torch.full((len(rewards),), 0.25, dtype=dtype),
        values=old.to(dtype).tanh(),
    )


def three_groups(old: Tensor, views: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Two groups whose rewards differ and one of equal rewards, with log-probs of shape (12, 7)."""
    return token_batch(**THREE_GROUPS, old=old, views=views, dtype=dtype)


def weighted_advantages(advantages: Tensor, delta: Tensor, *, mixing: float, clip_radius: float) -> Tensor:
    """What the contrastive method makes of given (B,) advantages and (B, T) evidence, in place of its group's."""
    settings = {"weight": {"lambda_init": mixing, "lambda_schedule": "constant", "clip_radius": clip_radius}}
    rows, width = delta.shape
    views = {"correct": delta, "wrong": torch.zeros_like(delta)}
    batch = token_batch([0.0] * rows, [0] * rows, lengths=[width] * rows, old=delta, views=views, dtype=delta.dtype)
    with mock.patch("cepo.algorithms.statistics.group_advantages", return_value=advantages):
        return build_estimator("cepo", settings).signal(batch, step=0).advantages


def signal_of(method: str, batch: TokenBatch, *, step: int = 0, **settings: Any) -> TokenSignal:
    """What a method with these settings makes of a batch."""
    return build_estimator(method, settings).signal(batch, step=step)


def advantages_of(method: str, batch: TokenBatch, *, step: int = 0, **settings: Any) -> Tensor:
    return signal_of(method, batch, step=step, **settings).advantages


def rows_of_batch(batch: TokenBatch, order: Tensor) -> TokenBatch:
    """The batch with these of its rows, in this order."""
    moved: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            moved[name] = value[order]
        else:
            moved[name] = {key: rows[order] for key, rows in value.items()}
    return replace(batch, **moved)


def log_probs_like(shape: Sequence[int], seed: int, scale: float = 3.0) -> Tensor:
    """Reproducible log-probs: negative numbers of mean magnitude `scale`, float64."""
    generator = torch.Generator().manual_seed(seed)
    return -scale * torch.empty(tuple(shape), dtype=torch.float64).exponential_(generator=generator)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality that tells 0.0 from -0.0 and knows no tolerance."""
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}
    return left.dtype == right.dtype and torch.equal(left.view(whole[left.dtype]), right.view(whole[right.dtype]))


class HalfVisual(Visual):
    """Visual evidence from half of each image instead of none."""

    def references(self, group: RolloutGroup) -> dict[str, list[Reference | None]]:
        return {"blind": [ImageReference(masked=0.5)] * len(group.rollouts)}
