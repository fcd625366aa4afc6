"""Implements CEPO, which credits tokens that are likelier given the right answer than given the group's wrong one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.algorithms import EvidenceEstimator, register_estimator
from cepo.algorithms.references import positive_references, wrong_reference
from cepo.algorithms.settings import ContrastiveConfig
from cepo.types import Reference, RolloutGroup


@register_estimator("cepo")
class Cepo(EvidenceEstimator):
    """Weights GRPO's advantage by `delta_t = log P_correct(y_t) - log P_wrong(y_t)`, without the student's prior.

    Degenerate cases: `P_wrong = P_student` gives RLSD exactly, equal references give GRPO exactly. Source: CEPO, eq. 5-7.
    """

    Config = ContrastiveConfig
    config: ContrastiveConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    views = contrast = ("correct", "wrong")
    reads_old_log_probs = False

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        # Without weights only the baseline reads a teacher.
        wrong = wrong_reference(group, self.config.negative) if self.is_weighted(group.step) else None
        return {"correct": positive_references(group, self.positive), "wrong": [wrong] * len(group.rollouts)}

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Shows no wrong answer without the right one: then there is no evidence, hence GRPO.

        If none of a rollout's wrong answers can be shown, `negative.fallback` decides: `student` keeps the right one
        alone, `neutral` gives no evidence.
        """
        wrong = {view: rows for view, rows in shown.items() if view != "correct"}
        suffices = [self.negative.fallback != "neutral" or any(each) for each in zip(*wrong.values(), strict=True)]
        correct = [one and other for one, other in zip(shown["correct"], suffices, strict=True)]
        return {"correct": correct} | {
            view: [one and other for one, other in zip(rows, shown["correct"], strict=True)]
            for view, rows in wrong.items()
        }
