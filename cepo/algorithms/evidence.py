"""Defines what methods share that weight an advantage token by token by evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cepo.algorithms import statistics
from cepo.algorithms.base import GroupRelativeEstimator
from cepo.algorithms.hindsight import evidence_of_right_answer, hindsight_advantages
from cepo.algorithms.settings import EvidenceConfig, MixingConfig, PositiveConfig, WeightedConfig
from cepo.metrics import Metric, Metrics, mean_of, mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """The factor w_t of each token's advantage, with metrics and further tensors to record, (B, T)."""

    values: Float[Tensor, "B T"]
    metrics: Metrics = field(default_factory=dict[str, Metric])
    diagnostics: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict[str, "Tensor"])


class WeightedEstimator(GroupRelativeEstimator):
    """Base of methods that scale an advantage A, by default GRPO's, token by token: `A_hat_t = A (1 + lambda (w_t - 1))`.

    A method writes its `evidence` delta_t, and `weights` if its w_t is not `clip(exp(sign(A) delta_t), 1 - r, 1 + r)`,
    with r from `weight.clip_radius`. Guarantees of this weight: `sign(A_hat_t) = sign(A)` and
    `|A_hat_t - A| <= lambda r |A|`. Degenerate cases, each exactly A: lambda = 0 (no teacher is used), r = 0, delta_t = 0.
    """

    config: WeightedConfig
    Config = WeightedConfig

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Returns delta_t; what it has on padding does not matter."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `evidence` nor `signal`")

    def weights(self, delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], batch: TokenBatch) -> TokenWeights:
        """Computes w_t from delta_t, which is 0 where it does not count, and the sign of A."""
        clip_radius = self.config.weight.clip_radius
        weight = statistics.evidence_weight(delta, sign, clip_radius=clip_radius)
        clipped_at = statistics.clipping(delta, sign, clip_radius=clip_radius)
        counted = batch.response_mask & (sign != 0)
        return TokenWeights(
            values=weight,
            metrics={
                "evidence/clip_low_rate": mean_of((clipped_at < 0).float(), counted),
                "evidence/clip_high_rate": mean_of((clipped_at > 0).float(), counted),
            },
            diagnostics={"raw_weight": (sign * delta).exp(), "clipping": clipped_at},
        )

    def mixing(self, step: int) -> float:
        """Returns lambda at the 0-based step: see `scheduled_mixing`."""
        return scheduled_mixing(step, self.config.weight)

    def is_weighted(self, step: int) -> bool:
        """Returns whether weights have any effect at this step."""
        return self.mixing(step) > 0 and self.config.weight.clip_radius > 0

    def needs_teacher(self, *, step: int) -> bool:
        return self.is_weighted(step)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """Returns A: (B, 1) of the rollouts, or (B, T) of the tokens together with their baseline V_t."""
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        return advantages.unsqueeze(1), None

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes A_hat_t; A where no teacher is needed."""
        mask = batch.response_mask
        mixing = self.mixing(step)  # lambda(k)
        advantages, values = self.advantages(batch)  # A, V_t
        metrics = statistics.group_metrics(batch)
        if not self.needs_teacher(step=step):
            plain = statistics.over_response(advantages.squeeze(1), mask)
            return TokenSignal(advantages=plain, metrics=metrics | {"evidence/lambda": mean_value(mixing)})
        delta = self.evidence(batch).detach().where(mask, 0.0)
        sign = statistics.advantage_sign(advantages)
        weights = self.weights(delta, sign, batch)
        weighted = statistics.mixed_advantages(advantages, weights.values, mixing=mixing)

        metrics |= statistics.delta_metrics(delta, advantages, mask, batch.correct, mixing=mixing)
        metrics["evidence/weight_mean"] = mean_of(weights.values, mask & (sign != 0))
        metrics |= weights.metrics
        diagnostics = {"delta": delta, "weight": weights.values.to(delta.dtype)} | dict(weights.diagnostics)
        if values is not None:
            metrics |= statistics.value_metrics(values, batch)
            diagnostics["value"] = values
        return TokenSignal(
            advantages=weighted.to(advantages.dtype).where(mask, 0.0),
            metrics=metrics,
            diagnostics={name: tensor.where(mask, 0.0) for name, tensor in diagnostics.items()},
        )


def scheduled_mixing(step: int, weight: MixingConfig) -> float:
    """Returns `lambda(k) = lambda_init max(0, 1 - k / lambda_decay_steps)`, or constantly `lambda_init`.

    In the first `lambda_warmup_steps` lambda rises linearly instead, and k counts the steps after them.
    """
    after_warmup = step - weight.lambda_warmup_steps
    if after_warmup < 0:
        return weight.lambda_init * (step + 1) / weight.lambda_warmup_steps
    if weight.lambda_schedule == "constant":
        return weight.lambda_init
    return weight.lambda_init * max(0.0, 1.0 - after_warmup / weight.lambda_decay_steps)


def log_mean_probability(batch: TokenBatch, views: Sequence[str]) -> Float[Tensor, "B T"]:
    """Computes `log (1/K) sum_k P_k(y_t)` over the K of the views in which a row has a reference.

    For rows without any it is the student's log-prob, which their teachers' log-probs are.
    """
    log_student = batch.teacher_log_probs[views[0]]  # of rows without a reference
    log_sum = log_student.new_full(log_student.shape, -math.inf)  # (B, T)
    count = batch.group_ids.new_zeros(batch.group_ids.shape)  # (B,) K
    for view in views:
        has_reference = batch.has_reference[view]  # (B,)
        # log 0 leaves the sum of a row without a reference as it is.
        log_prob = batch.teacher_log_probs[view].where(has_reference.unsqueeze(1), -math.inf)
        log_sum = log_sum.logaddexp(log_prob)
        count = count + has_reference
    log_count = count.clamp(min=1).to(log_sum.dtype).log()
    log_mean = log_sum - log_count.unsqueeze(1)
    has_any_reference = (count > 0).unsqueeze(1)
    return log_mean.where(has_any_reference, log_student)


def beliefs(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Returns P(right) before each token: V_t of `hindsight`, with the share of right ones among the group's others for p.

    The teacher is that of the view `correct`. Raises `ConfigError`: a group has a single rollout.
    """
    prior, _ = statistics.pass_rate_of_others(batch.correct.double(), batch.group_ids)
    return statistics.evidence_values(prior, evidence_of_right_answer(batch))


class EvidenceEstimator(WeightedEstimator):
    """Base of methods that weight GRPO's advantage, or that over the hindsight baseline, by evidence from answers.

    With the hindsight baseline every step uses teachers, and all rollouts learn.
    """

    config: EvidenceConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    Config = EvidenceConfig

    @property
    def in_hindsight(self) -> bool:
        """Whether the baseline is that of `hindsight`."""
        return self.config.advantage.baseline == "hindsight"

    @property
    def positive(self) -> PositiveConfig:
        """The settings of the right side. A baseline must not know how the response ends."""
        if self.in_hindsight:
            return dataclasses.replace(self.config.positive, exclude_self=True)
        return self.config.positive

    def needs_teacher(self, *, step: int) -> bool:
        return self.in_hindsight or self.is_weighted(step)

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        if self.in_hindsight:
            return statistics.all_rows(rewards)
        return statistics.live_rows(rewards, group_ids)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        if self.in_hindsight:
            return hindsight_advantages(batch, self.config.advantage)
        return super().advantages(batch)
