"""Defines what methods share that weight an advantage token by token by evidence."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from cepo.algorithms import credit
from cepo.algorithms.base import Estimator, GroupRelativeEstimator
from cepo.algorithms.settings import EvidenceConfig, WeightedConfig
from cepo.metrics import mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


class WeightedEstimator(GroupRelativeEstimator):
    """Base of methods that scale an advantage A, by default GRPO's, token by token: `A_hat_t = A (1 + lambda (w_t - 1))`.

    `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)` with lambda of the step and clip radius r. Guarantees:
    `sign(A_hat_t) = sign(A)` and `|A_hat_t - A| <= lambda r |A|`. Degenerate cases, each exactly A: lambda = 0 (no
    teacher is used), r = 0, delta_t = 0.
    """

    config: WeightedConfig
    contrast: ClassVar[tuple[str, str]]
    """The policies P and Q of the evidence `delta_t = log P(y_t) - log Q(y_t)`: views, or `student` before the update."""

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Computes delta of the two policies of `contrast`."""
        policies = {"student": batch.old_log_probs, **batch.teacher_log_probs}
        log_p, log_q = (policies[name] for name in self.contrast)
        return log_p - log_q

    def mixing(self, step: int) -> float:
        """Returns lambda: linear in the warm-up; then constant, or 0 from `lambda_decay_steps` after it on."""
        weight, after = self.config.weight, step - self.config.weight.lambda_warmup_steps
        if after < 0:
            return weight.lambda_init * (step + 1) / weight.lambda_warmup_steps
        if weight.lambda_schedule == "constant":
            return weight.lambda_init
        return weight.lambda_init * max(0.0, 1.0 - after / weight.lambda_decay_steps)

    def is_weighted(self, step: int) -> bool:
        """Returns whether weights have any effect at this step."""
        return self.mixing(step) > 0 and self.config.weight.clip_radius > 0

    def needs_teacher(self, *, step: int) -> bool:
        return self.is_weighted(step)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """Returns A: (B, 1) of the rollouts, or (B, T) of the tokens together with their baseline V_t."""
        return credit.group_advantages(batch.rewards, batch.group_ids, self.config.advantage).unsqueeze(1), None

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes `A_hat_t` in float64, with 0 on padding; A if no teacher is needed."""
        mask, mixing, radius = batch.response_mask, self.mixing(step), self.config.weight.clip_radius
        advantages, values = self.advantages(batch)
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        if not self.needs_teacher(step=step):
            plain = credit.over_response(advantages.squeeze(1), mask)
            return TokenSignal(advantages=plain, metrics=metrics | {"evidence/lambda": mean_value(mixing)})
        counted = mask
        if self.config.weight.mixed_groups_only:
            counted = mask & credit.live_rows(batch.correct.double(), batch.group_ids).unsqueeze(1)
        delta, sign = self.evidence(batch).detach().where(counted, 0.0), credit.advantage_sign(advantages)
        weight = credit.evidence_weight(delta, sign, clip_radius=radius)
        weighted = advantages.double() * (1.0 + mixing * (weight - 1.0))
        metrics |= credit.evidence_metrics(delta, advantages, mask, batch.correct, mixing=mixing, clip_radius=radius)
        raw, clipped = (sign * delta).exp().where(mask, 0.0), weight.to(delta.dtype).where(mask, 0.0)
        diagnostics = {"delta": delta, "raw_weight": raw, "weight": clipped}
        if values is not None:
            metrics |= credit.value_metrics(values, batch)
            diagnostics["value"] = values
        scaled = weighted.to(advantages.dtype).where(mask, 0.0)
        return TokenSignal(advantages=scaled, metrics=metrics, diagnostics=diagnostics)


class EvidenceEstimator(WeightedEstimator):
    """Base of methods that weight GRPO's advantage, or that over the hindsight baseline, by evidence from answers.

    With the hindsight baseline every step uses teachers, and all rollouts learn.
    """

    config: EvidenceConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.in_hindsight = self.config.advantage.baseline == "hindsight"
        self.reads_old_log_probs = self.reads_old_log_probs or self.in_hindsight
        self.positive = self.config.positive
        if self.in_hindsight:  # a baseline must not know how the response ends
            self.positive = dataclasses.replace(self.positive, exclude_self=True)

    def needs_teacher(self, *, step: int) -> bool:
        return self.in_hindsight or self.is_weighted(step)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return (Estimator if self.in_hindsight else GroupRelativeEstimator).live_rows(self, rewards, group_ids)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        if self.in_hindsight:
            return credit.hindsight_advantages(batch, self.config.advantage)
        return super().advantages(batch)
