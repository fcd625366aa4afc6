"""CEPO: credit for tokens that the right answer favours while a wrong answer of the same group disfavours them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms.base import register_estimator
from cepo.algorithms.evidence import EvidenceEstimator
from cepo.algorithms.references import contrastive_references, contrastive_sides
from cepo.algorithms.settings import EvidenceConfig, NegativeConfig
from cepo.sections import section
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("cepo")
class Cepo(EvidenceEstimator):
    """`delta_t = log P_correct(y_t) - log P_wrong(y_t)`; the student's prior cancels.

    Source: CEPO, eq. 5-7. Degenerate cases: `P_wrong = P_student` gives RLSD exactly, equal references give GRPO exactly.
    """

    @section
    class Config(EvidenceConfig):
        """The evidence settings and the choice of the wrong answer."""

        negative: NegativeConfig = NegativeConfig()

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
    views = ("correct", "wrong")
    reads_old_log_probs = False

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """The right answer and one wrong answer, the same for all rollouts of the group."""
        correct, wrong = contrastive_references(group, self.config.positive, self.config.negative)
        return {"correct": correct, "wrong": wrong}

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Without a right side there is no wrong one, hence GRPO; without a wrong side `negative.fallback` decides."""
        correct, wrong = contrastive_sides(shown["correct"], shown["wrong"], self.config.negative)
        return {"correct": correct, "wrong": wrong}

    def delta(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """log P_correct - log P_wrong."""
        return batch.teacher_log_probs["correct"] - batch.teacher_log_probs["wrong"]
