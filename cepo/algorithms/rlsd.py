"""RLSD: a teacher that has seen the right answer scales each token's advantage against the student's own log-prob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms.base import register_estimator
from cepo.algorithms.evidence import EvidenceEstimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import EvidenceConfig
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("rlsd")
class Rlsd(EvidenceEstimator):
    """`delta_t = log P_correct(y_t) - log P_student(y_t)`, with P_student the old policy.

    Source: RLSD (Yang et al. 2026), algorithm 1. A group without a positive reference has delta = 0, hence GRPO.
    """

    Config = EvidenceConfig
    views = ("correct",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """The right answer, the same for all rollouts of the group."""
        return {"correct": positive_references(group, self.config.positive)}

    def delta(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """log P_correct - log P_student."""
        return batch.teacher_log_probs["correct"] - batch.old_log_probs
