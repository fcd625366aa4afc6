"""Implements RLSD, which scales advantages by the log-probs of a teacher with the right answer over the student's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.algorithms import EvidenceEstimator, register_estimator, statistics
from cepo.algorithms.evidence import counted_evidence, evidence_signal, unweighted_signal
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import EvidenceConfig
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal


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

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes A_hat_t; A where no teacher is needed."""
        mixing = self.mixing(step)  # lambda(k)
        clip_radius = self.config.weight.clip_radius  # r
        advantages, values = self.advantages(batch)  # A
        if not self.needs_teacher(step=step):
            return unweighted_signal(batch, advantages, mixing=mixing)
        evidence = batch.teacher_log_probs["correct"] - batch.old_log_probs
        delta = counted_evidence(evidence, batch, self.config.weight)
        weight = statistics.evidence_weight(delta, statistics.advantage_sign(advantages), clip_radius=clip_radius)
        weighted = statistics.mixed_advantages(advantages, weight, mixing=mixing)
        return evidence_signal(
            batch,
            weighted,
            advantages=advantages,
            delta=delta,
            weight=weight,
            mixing=mixing,
            clip_radius=clip_radius,
            values=values,
        )
