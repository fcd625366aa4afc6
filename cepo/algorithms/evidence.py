"""What RLSD and CEPO share beside their mathematics: when they ask a teacher, and what is recorded of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cepo.algorithms import credit
from cepo.algorithms.base import GroupRelativeEstimator
from cepo.algorithms.settings import EvidenceConfig
from cepo.metrics import mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class EvidenceEstimator(GroupRelativeEstimator):
    """A method that scales GRPO's advantage A token by token.

    Degenerate cases, each exactly GRPO: lambda = 0 (no teacher is asked), clip radius 0, evidence 0.
    """

    config: EvidenceConfig

    def needs_teacher(self, *, step: int) -> bool:
        """False where lambda(step) = 0 or the clip radius is 0: the weights would not be read."""
        return self.config.lambda_at(step) > 0 and self.config.clip_radius > 0

    def plain_signal(self, batch: TokenBatch, advantages: Float[Tensor, " B"], *, step: int) -> TokenSignal:
        """GRPO's signal, for a step that asks no teacher."""
        plain = credit.outcome_signal(batch, advantages)
        mixing = {"evidence/lambda": mean_value(self.config.lambda_at(step))}
        return dataclasses.replace(plain, metrics=plain.metrics | mixing)

    def weighted_signal(
        self,
        batch: TokenBatch,
        advantages: Float[Tensor, " B"],
        delta: Float[Tensor, "B T"],
        weight: Float[Tensor, "B T"],
        weighted: Float[Tensor, "B T"],
        *,
        step: int,
    ) -> TokenSignal:
        """The weighted advantages, with delta and weight recorded; 0 on padding."""
        mask, mixing, radius = batch.response_mask, self.config.lambda_at(step), self.config.clip_radius
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        metrics |= credit.evidence_metrics(delta, advantages, mask, batch.correct, mixing=mixing, clip_radius=radius)
        return TokenSignal(
            advantages=weighted.to(advantages.dtype).where(mask, 0.0),
            metrics=metrics,
            diagnostics={"delta": delta, "weight": weight.to(delta.dtype).where(mask, 0.0)},
        )
