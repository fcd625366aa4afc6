"""Makes the batch that a method sees, and the optimizer batches of actor and critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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


def scored_batch(plan: ScoringPlan, scored: Mapping[RowName, Tensor], **fields: Any) -> ScoredBatch:
    """Returns the batch of a plan whose rows got these log-probs, (response length,); `fields` replaces or adds some."""
    rollouts = plan.rollouts
    old_log_probs = with_scored(rollouts.sampled_log_probs, scored)
    common: dict[str, Any] = {
        "token_level_rewards": rollouts.token_level_rewards,
        "response_mask": rollouts.response_mask,
        "old_log_probs": old_log_probs,
        "group_ids": rollouts.group_ids,
        "teacher_log_probs": {view.name: with_scored(old_log_probs, scored, view.name) for view in plan.views},
        "correct": rollouts.correct,
        "has_reference": {view.name: view.has_reference for view in plan.views},
        "reward_baselines": rollouts.reward_baselines,
    }
    return ScoredBatch(plan=plan, **common | fields)


def with_scored(log_probs: Tensor, scored: Mapping[RowName, Tensor], view: str = OWN_VIEW) -> Tensor:
    """Returns (B, T) `log_probs`, with those of the scored rows, (response length,), in place of the view's."""
    result = log_probs.clone()
    for (name, row), values in scored.items():
        if name == view and row is not None:
            result[row, : len(values)] = values
    return result


def restricted(
    signal: TokenSignal, rollouts: Rollouts, live: Tensor, entropies: Tensor | None, algorithm: AlgorithmConfig
) -> TokenSignal:
    """Removes from the signal the tokens that `algorithm.overlong_filter` and `algorithm.top_entropy` exclude.

    `top_entropy` is the share to keep of the tokens of `live` rows, (B,): those drawn from the distributions with the
    highest of the `entropies`, (B, T) in nats. Ties at the threshold are kept. Denominators of the loss still count all
    tokens. Sources: DAPO (Yu et al. 2025) for cut responses; Wang et al. 2025 (arXiv 2506.01939) for entropy, who
    average over kept tokens alone.
    """
    kept = rollouts.response_mask
    metrics = dict(signal.metrics)
    if algorithm.overlong_filter:
        kept = kept & rollouts.finished.unsqueeze(1)
    if entropies is not None:
        learning = kept & live.unsqueeze(1)
        found = entropies[learning]
        if len(found):
            first = len(found) - max(1, round(algorithm.top_entropy * len(found)))
            kept = kept & (entropies >= found.sort().values[first])
        metrics["rollout/vocabulary_entropy"] = mean_of(entropies, learning)
        metrics["rollout/learning_tokens"] = mean_of(kept.float(), learning)
    distillation = signal.distillation
    if distillation is not None:
        distillation = dataclasses.replace(distillation, token_weight=distillation.token_weight.where(kept, 0.0))
    advantages = signal.advantages.where(kept, 0.0)
    return dataclasses.replace(signal, advantages=advantages, metrics=metrics, distillation=distillation)


def actor_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[OptimizerBatch]:
    """Returns an epoch's batches of `num_prompts` prompts: live rows, but denominators of all rows."""
    rollouts, plan, distillation = batch.rollouts, batch.plan, signal.distillation
    reference = batch.reference_log_probs
    parts: list[OptimizerBatch] = []
    for rows, denominators in _cuts(rollouts, num_prompts, max_response_length):
        live = rows[plan.live[rows]]
        on_policy = bool(plan.on_policy[rows].all())
        distilled = distillation and dataclasses.replace(distillation, token_weight=distillation.token_weight[live])
        parts.append(
            OptimizerBatch(
                rows=[rollouts.scoring_row(int(row)) for row in live],
                old_log_probs=(rollouts.sampled_log_probs if on_policy else batch.old_log_probs)[live],
                on_policy=on_policy,
                advantages=signal.advantages[live],
                response_mask=rollouts.response_mask[live],
                denominators=denominators,
                sampled_log_probs=None if on_policy else rollouts.sampled_log_probs[live],
                reference_log_probs=None if reference is None else reference[live],
                distillation=distilled,
            )
        )
    return parts


def critic_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[CriticBatch]:
    """Returns the critic's batches, split like `actor_batches` but with all rows, since each has a target."""
    assert batch.values is not None and signal.returns is not None, "a method with needs_values returns the targets"
    return [
        CriticBatch(
            rows=[batch.rollouts.scoring_row(int(row)) for row in rows],
            old_values=batch.values[rows],
            returns=signal.returns[rows],
            response_mask=batch.rollouts.response_mask[rows],
            denominators=denominators,
        )
        for rows, denominators in _cuts(batch.rollouts, num_prompts, max_response_length)
    ]


def _cuts(rollouts: Rollouts, num_prompts: int, max_response_length: int) -> Iterator[tuple[Tensor, LossDenominators]]:
    for rows in torch.split(torch.arange(len(rollouts.generations)), num_prompts * rollouts.group_size):
        num_tokens = int(rollouts.response_mask[rows].sum())
        yield rows, LossDenominators(num_tokens, len(rows), max_response_length)
