"""What RLSD and CEPO share: one kernel that turns a per-token evidence delta into a weight on GRPO's advantage."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from cepo.algorithms.base import GroupRelativeEstimator
from cepo.algorithms.settings import EvidenceConfig, TeacherConfig
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class EvidenceEstimator(GroupRelativeEstimator):
    """`A_hat_t = A * (1 + lambda(k) * (w_t - 1))` with `w_t = clip(exp(sign(A) * delta_t), 1 - r, 1 + r)`.

    Degenerate cases, each exactly GRPO: lambda = 0 (no teacher is asked), r = 0, delta = 0.
    """

    config: EvidenceConfig

    @property
    def teacher(self) -> TeacherConfig:
        return self.config.teacher

    @abstractmethod
    def delta(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Evidence in nats for each sampled token."""

    def needs_teacher(self, *, step: int) -> bool:
        """False where lambda(step) = 0: the weights would not be read."""
        return self.config.lambda_at(step) > 0 and self.config.clip_radius > 0

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Evidence-weighted advantages; plain GRPO where no teacher was needed."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load
        from cepo.metrics import mean_value

        rewards, mask = batch.rewards, batch.response_mask
        advantages = credit.group_advantages(rewards, batch.group_ids, ddof=self.config.ddof, scale=self.config.scale)
        metrics = credit.group_metrics(rewards, batch.correct, batch.group_ids)
        mixing = self.config.lambda_at(step)
        if not self.needs_teacher(step=step):
            metrics["evidence/lambda"] = mean_value(mixing)
            return TokenSignal(advantages=credit.over_response(advantages, mask), metrics=metrics)
        radius = self.config.clip_radius
        delta = self.delta(batch).detach().where(mask, 0.0)
        weighted = credit.evidence_advantages(advantages, delta, mixing=mixing, clip_radius=radius)
        metrics |= credit.evidence_metrics(delta, advantages, mask, batch.correct, mixing=mixing, clip_radius=radius)
        sign = credit.advantage_sign(advantages).unsqueeze(1)
        weight = credit.evidence_weight(delta, sign, clip_radius=radius)
        return TokenSignal(
            advantages=weighted.where(mask, 0.0),
            metrics=metrics,
            diagnostics={"delta": delta, "weight": weight.to(delta.dtype).where(mask, 0.0)},
        )
