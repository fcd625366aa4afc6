"""RLCSD: the right answer against the mean of several wrong answers, none of them the rollout's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cepo.algorithms.base import register_estimator
from cepo.algorithms.evidence import EvidenceEstimator
from cepo.algorithms.references import contrastive_sides, positive_references, wrong_references
from cepo.algorithms.settings import ContrastiveConfig
from cepo.sections import section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("rlcsd")
class Rlcsd(EvidenceEstimator):
    """`delta_t = log P_correct(y_t) - log (1/K) sum_k P_wrong_k(y_t)`, `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)`,
    `A_hat_t = A (1 + lambda(k) (w_t - 1))` with GRPO's advantage A.

    The wrong references are those of up to K other rollouts of the group whose texts differ. Degenerate cases: one wrong
    reference gives CEPO exactly, none gives RLSD. Source: the evidence of RLCSD (arXiv 2606.11709) with RLSD's weight in
    place of its tanh and its two averages of the loss.
    """

    @section
    class Config(ContrastiveConfig):
        """The contrastive settings and the number of wrong references."""

        num_wrong: int = Field(
            default=4, ge=1, description="Most wrong references per rollout, K. Each one costs a teacher pass."
        )

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
    reads_old_log_probs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._wrong_views = tuple(f"wrong_{number}" for number in range(1, self.config.num_wrong + 1))
        self.views = ("correct", *self._wrong_views)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """The right answer, and for each rollout the wrong answers of others; None for views beyond their number."""
        wrong = wrong_references(
            group, self.config.negative, self.config.num_wrong if self.is_weighted(group.step) else 0
        )
        sides = {
            view: [found[place] if place < len(found) else None for found in wrong]
            for place, view in enumerate(self._wrong_views)
        }
        return {"correct": positive_references(group, self.positive), **sides}

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Without a right side there are no wrong ones, hence GRPO; without any wrong side `negative.fallback` decides."""
        any_wrong = [any(each) for each in zip(*(shown[view] for view in self._wrong_views), strict=True)]
        correct, wrong = contrastive_sides(shown["correct"], any_wrong, self.config.negative)
        sides = {
            view: [one and stays for one, stays in zip(shown[view], wrong, strict=True)] for view in self._wrong_views
        }
        return {"correct": correct, **sides}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """`A_hat_t = A (1 + lambda (w_t - 1))`; plain GRPO where no teacher is needed."""
        if not self.needs_teacher(step=step):
            return self.plain_signal(batch, step=step)
        return self.weighted_signal(batch, batch.teacher_log_probs["correct"] - self._log_mean(batch), step=step)

    def _log_mean(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """`log (1/K) sum_k P_wrong_k(y_t)` over the references that a row has; the student's log-prob for a row without any."""
        first, *others = self._wrong_views
        count = batch.has_reference[first].clone().long()
        total = batch.teacher_log_probs[first].where(batch.has_reference[first].unsqueeze(1), -math.inf)
        for view in others:
            shown = batch.has_reference[view]
            total = total.logaddexp(batch.teacher_log_probs[view].where(shown.unsqueeze(1), -math.inf))
            count = count + shown
        mean = total - count.clamp(min=1).to(total.dtype).log().unsqueeze(1)
        return mean.where((count > 0).unsqueeze(1), batch.teacher_log_probs[first])
