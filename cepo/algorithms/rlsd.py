"""Implements RLSD, which scales advantages by the log-probs of a teacher with the right answer over the student's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import EvidenceEstimator, register_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import EvidenceConfig
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("rlsd")
class Rlsd(EvidenceEstimator):
    """Weights GRPO's advantage A by the evidence of the right answer against the student, token by token.

        delta_t = log P_correct(y_t) - log P_student(y_t)         P_student being the old policy
        w_t     = clip(exp(sign(A) delta_t), 1 - r, 1 + r)
        A_hat_t = A ((1 - lambda(k)) + lambda(k) w_t)

    Without a reference delta is 0 (GRPO). Source: algorithm 1 of RLSD (Yang et al. 2026).
    """

    Config = EvidenceConfig
    views = ("correct",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"correct": positive_references(group, self.positive)}

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        return batch.teacher_log_probs["correct"] - batch.old_log_probs
