"""Registers a control of the study: cepo with its two teachers exchanged (`algorithm.adv_estimator=inverted_cepo`)."""

from __future__ import annotations

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.types import TokenBatch, TokenSignal


@register_estimator("inverted_cepo")
class InvertedCepo(Cepo):
    """`w_t = clip(exp(-sign(A) delta_t), 1 - r, 1 + r)`: tokens that cepo credits more than others are credited less."""

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        if not self.needs_teacher(step=step):
            return self.plain_signal(batch, step=step)
        delta = batch.teacher_log_probs["wrong"] - batch.teacher_log_probs["correct"]
        return self.weighted_signal(batch, delta, step=step)
