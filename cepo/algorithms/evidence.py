"""What methods that learn from evidence share: the two baselines, when they ask a teacher, what is recorded of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cepo.algorithms import credit
from cepo.algorithms.base import Estimator, GroupRelativeEstimator
from cepo.algorithms.grpo import group_advantages
from cepo.algorithms.settings import EvidenceConfig, HindsightConfig, PositiveConfig, WeightConfig
from cepo.metrics import Metrics, mean_of, mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


def one_sided_delta(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """`delta_t = log P_correct(y_t) - log P_student(y_t)`, 0 on padding."""
    delta = batch.teacher_log_probs["correct"] - batch.old_log_probs
    return delta.detach().where(batch.response_mask, 0.0)


def hindsight_advantages(
    batch: TokenBatch, config: HindsightConfig
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """`A_t = (R - V_t) / sigma` and the share `V_t = sigmoid(logit p + sum_{s<t} delta_s)` of right continuations.

    delta is `one_sided_delta`, and p the pass rate of the other rollouts. R and V_t are compared
    on the scale of the rewards, between `reward_low` and `reward_high`. `sigma = sqrt(p (1 - p) n / (n - ddof))` of that
    scale stands for the group's deviation, without the rollout's own reward; 1 with `scale: none`. Both 0 on padding.
    """
    mask, rewards, span = batch.response_mask, batch.rewards, config.reward_high - config.reward_low
    prior, size = credit.pass_rate_of_others(rewards, batch.group_ids, low=config.reward_low, high=config.reward_high)
    values = credit.evidence_values(prior, one_sided_delta(batch))
    advantages = rewards.double().unsqueeze(1) - (config.reward_low + span * values)
    if config.scale == "std":
        advantages = advantages / (span * (prior * (1.0 - prior) * size / (size - config.ddof)).sqrt()).unsqueeze(1)
    return advantages.to(rewards.dtype).where(mask, 0.0), values.to(rewards.dtype).where(mask, 0.0)


def of_others(positive: PositiveConfig) -> PositiveConfig:
    """Where the right answer comes from, without the rollout itself: a baseline must not know how its response ends."""
    return dataclasses.replace(positive, exclude_self=True)


def value_metrics(values: Float[Tensor, "B T"], batch: TokenBatch) -> Metrics:
    """What the baseline expects of the prefixes of rollouts that turn out right, and of the others."""
    right, mask = batch.correct.unsqueeze(1), batch.response_mask
    return {
        "evidence/value_mean_right": mean_of(values, mask & right),
        "evidence/value_mean_wrong": mean_of(values, mask & ~right),
    }


class WeightedEstimator(GroupRelativeEstimator):
    """A method that scales an advantage A token by token, by default GRPO's.

    Degenerate cases, each exactly A: lambda = 0 (no teacher is asked), clip radius 0, evidence 0.
    """

    config: WeightConfig

    def is_weighted(self, step: int) -> bool:
        """False where lambda(step) = 0 or the clip radius is 0: the weights would not be read."""
        return self.config.lambda_at(step) > 0 and self.config.clip_radius > 0

    def needs_teacher(self, *, step: int) -> bool:
        """Whether the weights read one."""
        return self.is_weighted(step)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """A: (B, 1) of the rollouts, or (B, T) of the tokens with the V_t of their baseline."""
        return group_advantages(batch.rewards, batch.group_ids, self.config).unsqueeze(1), None

    def plain_signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """GRPO's signal, for a step that asks no teacher."""
        plain = credit.outcome_signal(batch, group_advantages(batch.rewards, batch.group_ids, self.config))
        mixing = {"evidence/lambda": mean_value(self.config.lambda_at(step))}
        return dataclasses.replace(plain, metrics=plain.metrics | mixing)

    def weighted_signal(self, batch: TokenBatch, delta: Float[Tensor, "B T"], *, step: int) -> TokenSignal:
        """`A_hat_t = A (1 + lambda (w_t - 1))` with `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)`, in float64; 0 on padding.

        Delta is recorded, the weight before and after clipping, and a baseline of evidence.
        """
        mask, mixing, radius = batch.response_mask, self.config.lambda_at(step), self.config.clip_radius
        (advantages, values), counted = self.advantages(batch), mask
        if self.config.mixed_groups_only:
            counted = mask & credit.mixed_rows(batch.correct, batch.group_ids).unsqueeze(1)
        delta, sign = delta.detach().where(counted, 0.0), credit.advantage_sign(advantages)
        weight = credit.evidence_weight(delta, sign, clip_radius=radius)
        weighted = advantages.double() * (1.0 + mixing * (weight - 1.0))
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        metrics |= credit.evidence_metrics(delta, advantages, mask, batch.correct, mixing=mixing, clip_radius=radius)
        diagnostics = {
            "delta": delta,
            "raw_weight": (sign * delta).exp().where(mask, 0.0),
            "weight": weight.to(delta.dtype).where(mask, 0.0),
        }
        if values is not None:
            metrics |= value_metrics(values, batch)
            diagnostics["value"] = values
        return TokenSignal(
            advantages=weighted.to(advantages.dtype).where(mask, 0.0), metrics=metrics, diagnostics=diagnostics
        )


class EvidenceEstimator(WeightedEstimator):
    """A method that weighs evidence from answers: on GRPO's advantage, or on `hindsight_advantages` with `baseline: hindsight`.

    With the latter teachers are asked at every step, and all rollouts learn.
    """

    config: EvidenceConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reads_old_log_probs = self.reads_old_log_probs or self.in_hindsight

    @property
    def in_hindsight(self) -> bool:
        """Whether the baseline is one of evidence."""
        return self.config.baseline == "hindsight"

    @property
    def positive(self) -> PositiveConfig:
        """Where the right answer comes from."""
        return of_others(self.config.positive) if self.in_hindsight else self.config.positive

    def needs_teacher(self, *, step: int) -> bool:
        """Whether the weights or the baseline read one."""
        return self.in_hindsight or self.is_weighted(step)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Rollouts of groups whose rewards differ; with a baseline of evidence all, since it is never sure of a reward."""
        return (
            Estimator.live_rows(self, rewards, group_ids)
            if self.in_hindsight
            else super().live_rows(rewards, group_ids)
        )

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """A: (B, 1) of the group, or (B, T) of the evidence with its V_t."""
        return hindsight_advantages(batch, self.config) if self.in_hindsight else super().advantages(batch)
