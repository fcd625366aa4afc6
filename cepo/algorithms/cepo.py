"""Implements CEPO, which credits tokens that are likelier given the right answer than given the group's wrong one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import EvidenceEstimator, register_estimator
from cepo.algorithms.base import BatchField
from cepo.algorithms.references import in_some_view, positive_references, wrong_reference
from cepo.algorithms.settings import ContrastiveConfig
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


@register_estimator("cepo")
class Cepo(EvidenceEstimator):
    """Weights GRPO's advantage A by the evidence of the right answer against a wrong one, token by token.

        delta_t = log P_correct(y_t) - log P_wrong(y_t)                     equation 5
        w_t     = clip(exp(sign(A) delta_t), 1 - r, 1 + r)                  equation 6
        A_hat_t = A ((1 - lambda(k)) + lambda(k) w_t)                       equation 7
        lambda(k) = lambda_init max(0, 1 - k / lambda_decay_steps)          at the 0-based step k

    The student's prior is not part of delta. r is `weight.clip_radius`. Degenerate cases: `P_wrong = P_student`
    gives RLSD exactly, equal references give GRPO exactly. Source: CEPO, eq. 5-7.
    """

    Config = ContrastiveConfig
    config: ContrastiveConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    views = ("correct", "wrong")

    @property
    def reads(self) -> tuple[BatchField, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The hindsight baseline alone compares a teacher with the student."""
        return ("group_ids", "old_log_probs") if self.in_hindsight else ("group_ids",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        # Without weights only the baseline reads a teacher.
        wrong = wrong_reference(group, self.config.negative) if self.is_weighted(group.step) else None
        return {"correct": positive_references(group, self.positive), "wrong": [wrong] * len(group.rollouts)}

    def settled(self, shown: RowsByView) -> RowsByView:
        """Shows no wrong answer without the right one: then there is no evidence, hence GRPO.

        If none of a rollout's wrong answers can be shown, `negative.fallback` decides: `student` keeps the right one
        alone, `neutral` gives no evidence.
        """
        right_shown = shown["correct"]
        right_with_a_wrong = {view: rows & right_shown for view, rows in shown.items()}
        if self.negative.fallback == "neutral":
            right_with_a_wrong["correct"] = right_shown & in_some_view(shown, self.views[1:])
        return right_with_a_wrong

    def contrasted(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Returns log P_correct and log P_wrong, which are the student's own for rows without a reference."""
        return batch.teacher_log_probs["correct"], batch.teacher_log_probs["wrong"]

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Computes equation 5. `weights` has equation 6, and `statistics.mixed_advantages` equation 7."""
        log_correct, log_wrong = self.contrasted(batch)
        return log_correct - log_wrong
