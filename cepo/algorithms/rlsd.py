"""Implements RLSD, which scales advantages by the log-probs of a teacher with the right answer over the student's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.algorithms import EvidenceEstimator, register_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import EvidenceConfig
from cepo.types import Reference, RolloutGroup


@register_estimator("rlsd")
class Rlsd(EvidenceEstimator):
    """Weights GRPO's advantage by `delta_t = log P_correct(y_t) - log P_student(y_t)`, P_student being the old policy.

    Without a reference delta is 0 (GRPO). Source: algorithm 1 of RLSD (Yang et al. 2026).
    """

    Config = EvidenceConfig
    views = ("correct",)
    contrast = ("correct", "student")

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"correct": positive_references(group, self.positive)}
