"""Implements what methods that learn from evidence share: two baselines, the weighted signal and its metrics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from cepo.algorithms import credit
from cepo.algorithms.base import Estimator, GroupRelativeEstimator
from cepo.algorithms.settings import EvidenceConfig, HindsightAdvantageConfig, PositiveConfig, WeightedConfig
from cepo.metrics import Metrics, mean_of, mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

STUDENT = "student"
"""Names the policy before the update among those that are contrasted."""


def one_sided_delta(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Computes `delta_t = log P_correct(y_t) - log P_student(y_t)`, with 0 on padding."""
    delta = batch.teacher_log_probs["correct"] - batch.old_log_probs
    return delta.detach().where(batch.response_mask, 0.0)


def hindsight_advantages(
    batch: TokenBatch, config: HindsightAdvantageConfig
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Computes `A_t = (R - V_t) / sigma`, with the share V_t of right continuations, and returns both.

    `V_t = sigmoid(logit p + sum_{s<t} delta_s)` with `one_sided_delta` and the pass rate p of the other rollouts. R and
    V_t are compared on the scale of rewards, from `reward_low` to `reward_high`. On this scale
    `sigma = sqrt(p (1 - p) n / (n - ddof))` replaces the group's deviation, without the rollout's own reward; with
    `scale: none` it is 1. With `lam` below 1 the numerator is GAE's `sum_l lam^l (V_{t+l+1} - V_{t+l})` with R for the
    value after the last token, and 0 where its sign is not that of R - p. Both results are 0 on padding.
    """
    mask, rewards, span = batch.response_mask, batch.rewards, config.reward_high - config.reward_low
    prior, size = credit.pass_rate_of_others(rewards, batch.group_ids, low=config.reward_low, high=config.reward_high)
    values = credit.evidence_values(prior, one_sided_delta(batch))
    expected = config.reward_low + span * values
    advantages = rewards.double().unsqueeze(1) - expected
    if config.lam < 1:
        sign = (rewards.double() - config.reward_low - span * prior).sign().unsqueeze(1)
        advantages, _ = credit.generalised_advantages(
            batch.token_level_rewards, expected, mask, gamma=1.0, gae_lambda=config.lam
        )
        advantages = sign * (sign * advantages).relu()
    if config.scale == "std":
        advantages = advantages / (span * (prior * (1.0 - prior) * size / (size - config.ddof)).sqrt()).unsqueeze(1)
    return advantages.to(rewards.dtype).where(mask, 0.0), values.to(rewards.dtype).where(mask, 0.0)


def of_others(positive: PositiveConfig) -> PositiveConfig:
    """Excludes the rollout itself as source of the right answer: its baseline must not know how the response ends."""
    return dataclasses.replace(positive, exclude_self=True)


def value_metrics(values: Float[Tensor, "B T"], batch: TokenBatch) -> Metrics:
    """Returns the baseline's mean value over the tokens of right rollouts, and of wrong ones."""
    right, mask = batch.correct.unsqueeze(1), batch.response_mask
    return {
        "evidence/value_mean_right": mean_of(values, mask & right),
        "evidence/value_mean_wrong": mean_of(values, mask & ~right),
    }


class WeightedEstimator(GroupRelativeEstimator):
    """Base of methods that scale an advantage A, by default GRPO's, token by token.

    Degenerate cases, each exactly A: lambda = 0 (no teacher is used), clip radius 0, evidence 0.
    """

    config: WeightedConfig
    contrast: ClassVar[tuple[str, str]]
    """The policies P and Q of the evidence `delta_t = log P(y_t) - log Q(y_t)`: views, or the student."""

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Computes delta of the two policies of `contrast`."""
        log_p, log_q = (
            batch.old_log_probs if name == STUDENT else batch.teacher_log_probs[name] for name in self.contrast
        )
        return log_p - log_q

    def is_weighted(self, step: int) -> bool:
        """Returns whether weights have any effect at this step, that is, lambda(step) > 0 and the clip radius > 0."""
        return self.config.weight.lambda_at(step) > 0 and self.config.weight.clip_radius > 0

    def needs_teacher(self, *, step: int) -> bool:
        return self.is_weighted(step)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """Returns A: (B, 1) of the rollouts, or (B, T) of the tokens together with their baseline V_t."""
        return credit.group_advantages(batch.rewards, batch.group_ids, self.config.advantage).unsqueeze(1), None

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes `A_hat_t = A (1 + lambda (w_t - 1))` in float64, with 0 on padding; A if no teacher is needed.

        `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)`. Diagnostics are delta, the weight before and after clipping,
        and the values of a hindsight baseline.
        """
        settings, mask = self.config.weight, batch.response_mask
        mixing, radius = settings.lambda_at(step), settings.clip_radius
        (advantages, values), counted = self.advantages(batch), mask
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        if not self.needs_teacher(step=step):
            plain = credit.over_response(advantages.squeeze(1), mask)
            return TokenSignal(advantages=plain, metrics=metrics | {"evidence/lambda": mean_value(mixing)})
        if settings.mixed_groups_only:
            counted = mask & credit.live_rows(batch.correct.double(), batch.group_ids).unsqueeze(1)
        delta, sign = self.evidence(batch).detach().where(counted, 0.0), credit.advantage_sign(advantages)
        weight = credit.evidence_weight(delta, sign, clip_radius=radius)
        weighted = advantages.double() * (1.0 + mixing * (weight - 1.0))
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
    """Base of methods that weight GRPO's advantage, or with `advantage.baseline: hindsight` that of `hindsight_advantages`.

    The weights are evidence from answers. With the hindsight baseline every step uses teachers, and all rollouts learn.
    """

    config: EvidenceConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.in_hindsight = self.config.advantage.baseline == "hindsight"
        self.reads_old_log_probs = self.reads_old_log_probs or self.in_hindsight

    @property
    def positive(self) -> PositiveConfig:
        """The source of the right answer."""
        return of_others(self.config.positive) if self.in_hindsight else self.config.positive

    def needs_teacher(self, *, step: int) -> bool:
        return self.in_hindsight or self.is_weighted(step)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns True for rollouts of groups whose rewards differ; for all with hindsight, which is never certain."""
        return (Estimator if self.in_hindsight else GroupRelativeEstimator).live_rows(self, rewards, group_ids)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        return hindsight_advantages(batch, self.config.advantage) if self.in_hindsight else super().advantages(batch)
