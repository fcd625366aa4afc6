"""Implements visual evidence: tokens that the image makes likelier carry more of the advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.algorithms import WeightedEstimator, register_estimator, statistics
from cepo.algorithms.evidence import counted_evidence, evidence_signal, unweighted_signal
from cepo.algorithms.settings import WeightedConfig
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal


@register_estimator("visual")
class Visual(WeightedEstimator):
    """Weights GRPO's advantage A by the evidence of the image, token by token.

        delta_t = log P_student(y_t) - log P_blind(y_t)
        w_t     = clip(exp(sign(A) delta_t), 1 - r, 1 + r)
        A_hat_t = A ((1 - lambda(k)) + lambda(k) w_t)

    `P_blind` is the policy with the student's prompt without its images: no answer is shown, so none can leak.
    Degenerate case: a problem without images has delta = 0, hence GRPO. Source: the contrast of VA-OPD (arXiv
    2605.21924) and the visual privilege of ViCuR (arXiv 2606.05718), with RLSD's weight.
    """

    Config = WeightedConfig
    views = ("blind",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"blind": [Reference(blind=True)] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes A_hat_t; A where no teacher is needed."""
        mixing = self.mixing(step)  # lambda(k)
        clip_radius = self.config.weight.clip_radius  # r
        advantages, values = self.advantages(batch)  # A
        if not self.needs_teacher(step=step):
            return unweighted_signal(batch, advantages, mixing=mixing)
        evidence = batch.old_log_probs - batch.teacher_log_probs["blind"]
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
