"""Makes the batch that a method sees, and the optimizer batches of actor and critic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cepo.algorithms.masking import with_rows
from cepo.config.schema import AlgorithmConfig
from cepo.data.batch import OWN_VIEW, CriticBatch, OptimizerBatch, RowName
from cepo.losses.aggregation import LossDenominators
from cepo.metrics import Metric, Metrics, mean_of
from cepo.trainer.planning import ScoringPlan
from cepo.trainer.rollouts import Rollouts
from cepo.types import TokenBatch, TokenSignal


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(TokenBatch):
    """What the estimator reads of a step, and what the update needs beside it.

    The student's log-probs of rows that were not scored are the rollout engine's. A KL in the reward is subtracted from
    `token_level_rewards`.
    """

    plan: ScoringPlan
    reference_log_probs: Tensor | None = None  # (B, T) under the initial weights; None without a KL
    entropies: Tensor | None = None  # (B, T) in nats, of the student before each token of live rows; None if not needed
    metrics: Metrics = field(default_factory=dict[str, Metric])  # agreement with the engine's log-probs, and the KL

    @property
    def rollouts(self) -> Rollouts:
        return self.plan.rollouts


def scored_batch(
    plan: ScoringPlan,
    scored: Mapping[RowName, Tensor],
    *,
    token_level_rewards: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    values: Tensor | None = None,
    entropies: Tensor | None = None,
    metrics: Metrics | None = None,
) -> ScoredBatch:
    """Returns the batch of a plan whose rows got the log-probs `scored`, each (response length,).

    The other tensors are (B, T). `token_level_rewards` replaces the rollouts' own, where a KL is subtracted from them.
    """
    rollouts = plan.rollouts
    old_log_probs = with_scored(rollouts.sampled_log_probs, scored)
    return ScoredBatch(
        plan=plan,
        token_level_rewards=rollouts.token_level_rewards if token_level_rewards is None else token_level_rewards,
        response_mask=rollouts.response_mask,
        old_log_probs=old_log_probs,
        group_ids=rollouts.group_ids,
        teacher_log_probs={view.name: with_scored(old_log_probs, scored, view.name) for view in plan.views},
        correct=rollouts.correct,
        has_reference={view.name: view.has_reference for view in plan.views},
        reward_baselines=rollouts.reward_baselines,
        values=values,
        reference_log_probs=reference_log_probs,
        entropies=entropies,
        metrics=metrics or {},
    )


def with_scored(log_probs: Tensor, scored: Mapping[RowName, Tensor], view: str = OWN_VIEW) -> Tensor:
    """Returns (B, T) `log_probs`, with those of the scored rows, (response length,), in place of the view's."""
    rows: dict[int, Tensor] = {}
    for (name, row), row_log_probs in scored.items():
        if name == view and row is not None:
            rows[row] = row_log_probs
    return with_rows(log_probs, rows)


def restricted(
    signal: TokenSignal, rollouts: Rollouts, live: Tensor, entropies: Tensor | None, algorithm: AlgorithmConfig
) -> TokenSignal:
    """Removes from the signal the tokens that `algorithm.overlong_filter` and `algorithm.top_entropy` exclude.

    `top_entropy` is the share to keep of the tokens of `live` rows, (B,): those drawn from the distributions with the
    highest of the `entropies`, (B, T) in nats. Ties at the threshold are kept. Denominators of the loss still count all
    tokens. Sources: DAPO (Yu et al. 2025) for cut responses; Wang et al. 2025 (arXiv 2506.01939) for entropy, who
    average over kept tokens alone.
    """
    mask = rollouts.response_mask  # (B, T) True on the tokens that keep their signal
    metrics = dict(signal.metrics)
    if algorithm.overlong_filter:
        mask = mask & rollouts.finished.unsqueeze(1)
    if entropies is not None:
        candidates = mask & live.unsqueeze(1)
        mask = mask & (entropies >= _entropy_threshold(entropies[candidates], algorithm.top_entropy))
        metrics["rollout/vocabulary_entropy"] = mean_of(entropies, candidates)
        metrics["rollout/learning_tokens"] = mean_of(mask.float(), candidates)
    distillation = signal.distillation
    if distillation is not None:
        token_weight = distillation.token_weight.where(mask, 0.0)
        distillation = dataclasses.replace(distillation, token_weight=token_weight)
    advantages = signal.advantages.where(mask, 0.0)
    return dataclasses.replace(signal, advantages=advantages, metrics=metrics, distillation=distillation)


def _entropy_threshold(entropies: Tensor, share: float) -> float:
    """Returns the least of the `share` of the highest entropies, (N,); without any, all tokens keep their signal."""
    if len(entropies) == 0:
        return -math.inf
    num_highest = max(1, round(share * len(entropies)))
    ascending = entropies.sort().values
    return float(ascending[len(entropies) - num_highest])


def actor_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[OptimizerBatch]:
    """Returns an epoch's batches of `num_prompts` prompts: rows with an update pass, but denominators of all rows."""
    rollouts = batch.rollouts
    plan = batch.plan
    batches: list[OptimizerBatch] = []
    for rows, denominators in _cuts(rollouts, num_prompts, max_response_length):
        updated_rows = rows[plan.updated[rows]]
        on_policy = bool(plan.on_policy[rows].all())
        reference_log_probs = batch.reference_log_probs
        if reference_log_probs is not None:
            reference_log_probs = reference_log_probs[updated_rows]
        distillation = signal.distillation
        if distillation is not None:
            token_weight = distillation.token_weight[updated_rows]
            distillation = dataclasses.replace(distillation, token_weight=token_weight)
        batches.append(
            OptimizerBatch(
                rows=[rollouts.scoring_row(int(row)) for row in updated_rows],
                sampled_log_probs=rollouts.sampled_log_probs[updated_rows],
                old_log_probs=None if on_policy else batch.old_log_probs[updated_rows],
                advantages=signal.advantages[updated_rows],
                response_mask=rollouts.response_mask[updated_rows],
                denominators=denominators,
                reference_log_probs=reference_log_probs,
                distillation=distillation,
            )
        )
    return batches


def critic_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[CriticBatch]:
    """Returns the critic's batches, split like `actor_batches` but with all rows, since each has a target."""
    assert batch.values is not None and signal.returns is not None, "a method that reads values returns the targets"
    rollouts = batch.rollouts
    batches: list[CriticBatch] = []
    for rows, denominators in _cuts(rollouts, num_prompts, max_response_length):
        batches.append(
            CriticBatch(
                rows=[rollouts.scoring_row(int(row)) for row in rows],
                old_values=batch.values[rows],
                returns=signal.returns[rows],
                response_mask=rollouts.response_mask[rows],
                denominators=denominators,
            )
        )
    return batches


def _cuts(rollouts: Rollouts, num_prompts: int, max_response_length: int) -> Iterator[tuple[Tensor, LossDenominators]]:
    """Yields the rows of each optimizer step, with the denominators of its loss."""
    all_rows = torch.arange(len(rollouts.generations))
    for rows in torch.split(all_rows, num_prompts * rollouts.group_size):
        num_tokens = int(rollouts.response_mask[rows].sum())
        yield rows, LossDenominators(num_tokens, len(rows), max_response_length)
