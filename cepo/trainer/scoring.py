"""Holds the log-probs of a step's rollouts, and splits them into optimizer batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.data.batch import OWN_VIEW, CriticBatch, DistillationRows, OptimizerBatch, RowName
from cepo.losses.objective import LossDenominators, adapted_coefficient, agreement_metrics
from cepo.metrics import Metrics, mean_of, mean_value
from cepo.trainer.asking import Rollouts
from cepo.trainer.checkpoints import TrainerState
from cepo.trainer.planning import ScoringPlan
from cepo.trainer.protocol import Backend
from cepo.types import TokenBatch, TokenSignal

PROMPTS_COMPARED = 8
"""Prompts per step whose first response is scored at temperature 1 too, if the rollout temperature differs."""

LogProbs = Mapping[RowName, Tensor]
"""Maps (view, row) to log-probs, (response length,)."""


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The data of a step that the estimator and the update read.

    Attributes:
        old_log_probs: (B, T) of the student; rows that were not scored have those of the rollout engine.
        teacher_log_probs: view -> (B, T); rows without a teacher pass have those of the student.
        token_level_rewards: (B, T) the outcome reward at the last response token, minus a KL in the reward.
        reference_log_probs: (B, T) under the initial weights; None without a KL.
        values: (B, T) the critic's value before each token; None for methods without a critic.
        entropies: (B, T) in nats, of the student's distribution before each token of live rows; None if not needed.
        metrics: agreement of the trainer's log-probs with the engine's, and the KL.
    """

    plan: ScoringPlan
    old_log_probs: Tensor
    teacher_log_probs: Mapping[str, Tensor]
    token_level_rewards: Tensor
    reference_log_probs: Tensor | None
    values: Tensor | None
    metrics: Metrics
    entropies: Tensor | None = None

    @property
    def rollouts(self) -> Rollouts:
        return self.plan.rollouts

    def token_batch(self) -> TokenBatch:
        rollouts = self.rollouts
        return TokenBatch(
            token_level_rewards=self.token_level_rewards,
            response_mask=rollouts.response_mask,
            old_log_probs=self.old_log_probs,
            group_ids=rollouts.group_ids,
            teacher_log_probs=self.teacher_log_probs,
            correct=rollouts.correct,
            has_reference={view.name: view.has_reference for view in self.plan.views},
            reward_baselines=rollouts.reward_baselines,
            values=self.values,
        )


def with_scored(log_probs: Tensor, scored: LogProbs, view: str = OWN_VIEW) -> Tensor:
    """Returns (B, T) `log_probs`, with the scored rows of the view replaced."""
    result = log_probs.clone()
    for (name, row), values in scored.items():
        if name == view and row is not None:
            result[row, : len(values)] = values
    return result


def gap_at_temperature_1(rollouts: Rollouts, backend: Backend) -> Metrics:
    """Compares log-probs of engine and trainer at temperature 1, that of the engine's, for runs with another one."""
    first = range(0, len(rollouts.generations), rollouts.group_size)[:PROMPTS_COMPARED]
    scored = backend.score([rollouts.scoring_row(row) for row in first], temperature=1.0)
    sampled = [torch.tensor(rollouts.generations[row].log_probs) for row in first]
    counted = torch.ones(1, sum(map(len, sampled)), dtype=torch.bool)
    return agreement_metrics(torch.cat(sampled)[None], torch.cat(scored)[None], counted, 1.0)


def penalise(
    rewards: Tensor, penalties: Tensor, response_mask: Tensor, algorithm: AlgorithmConfig, state: TrainerState
) -> tuple[Tensor, Metrics]:
    """Subtracts each token's KL from its reward, and returns the rewards and metrics; all tensors are (B, T).

    `r_t <- r_t - coefficient * KL_t`, where `state` holds the coefficient, which is adapted afterwards. If the KL is a
    term of the loss, the rewards are unchanged.
    """
    measured = mean_of(penalties, response_mask)
    metrics: Metrics = {"critic/kl": measured}
    if algorithm.use_kl_loss:
        return rewards, metrics
    coefficient = state.kl_coefficient
    metrics["critic/kl_coef"] = mean_value(coefficient)
    if algorithm.kl_type == "adaptive":
        state.kl_coefficient = adapted_coefficient(
            coefficient,
            measured.result or 0.0,
            num_sequences=len(rewards),
            kl_target=algorithm.kl_target,
            kl_horizon=algorithm.kl_horizon,
        )
    return rewards - coefficient * penalties.where(response_mask, 0.0), metrics


def actor_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, epochs: int, max_response_length: int
) -> list[OptimizerBatch]:
    """Returns the actor's batches of `num_prompts` prompts, `epochs` times: live rows, but denominators of all rows."""
    rollouts, plan, distillation = batch.rollouts, batch.plan, signal.distillation
    parts: list[OptimizerBatch] = []
    reference = batch.reference_log_probs
    for rows, denominators in _cuts(rollouts, num_prompts, max_response_length):
        live = rows[plan.live[rows]]
        on_policy = bool(plan.on_policy[rows].all())
        distilled = distillation and DistillationRows(
            divergence=distillation.divergence, token_weight=distillation.token_weight[live], view=distillation.view
        )
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
    return parts * epochs


def critic_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, epochs: int, max_response_length: int
) -> list[CriticBatch]:
    """Returns the critic's optimizer batches, split like `actor_batches` but with all rows, since each has a target."""
    assert batch.values is not None and signal.returns is not None, "a method with needs_values returns the targets"
    parts = [
        CriticBatch(
            rows=[batch.rollouts.scoring_row(int(row)) for row in rows],
            old_values=batch.values[rows],
            returns=signal.returns[rows],
            response_mask=batch.rollouts.response_mask[rows],
            denominators=denominators,
        )
        for rows, denominators in _cuts(batch.rollouts, num_prompts, max_response_length)
    ]
    return parts * epochs


def _cuts(rollouts: Rollouts, num_prompts: int, max_response_length: int) -> Iterator[tuple[Tensor, LossDenominators]]:
    for rows in torch.split(torch.arange(len(rollouts.generations)), num_prompts * rollouts.group_size):
        num_tokens = int(rollouts.response_mask[rows].sum())
        yield rows, LossDenominators(num_tokens, len(rows), max_response_length)
