"""RLSD: a teacher that has seen the right answer scales each token's advantage against the student's own log-prob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.algorithms.base import register_estimator
from cepo.algorithms.evidence import EvidenceEstimator, one_sided_delta
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import EvidenceConfig
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal


@register_estimator("rlsd")
class Rlsd(EvidenceEstimator):
    """`delta_t = log P_correct(y_t) - log P_student(y_t)`, `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)`,
    `A_hat_t = A (1 + lambda(k) (w_t - 1))` with GRPO's advantage A and P_student the old policy.

    A group without a positive reference has delta = 0, hence GRPO. Source: RLSD (Yang et al. 2026), algorithm 1.
    """

    Config = EvidenceConfig
    views = ("correct",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """The right answer, the same for all rollouts of the group."""
        return {"correct": positive_references(group, self.positive)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """`A_hat_t = A (1 + lambda (w_t - 1))`; plain GRPO where no teacher is needed."""
        if not self.needs_teacher(step=step):
            return self.plain_signal(batch, step=step)
        return self.weighted_signal(batch, one_sided_delta(batch), step=step)
