"""Implements RLCSD, which contrasts the right answer with the mean of several wrong ones of other rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.algorithms.references import positive_references, wrong_references
from cepo.algorithms.settings import ContrastiveConfig
from cepo.sections.declaring import section
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("rlcsd")
class Rlcsd(Cepo):
    """Weights GRPO's advantage by `delta_t = log P_correct(y_t) - log (1/K) sum_k P_wrong_k(y_t)`.

    The wrong references come from up to K other rollouts of the group, with different texts. Degenerate cases: one
    wrong reference gives CEPO exactly, none gives RLSD. Source: the evidence of RLCSD (arXiv 2606.11709), with RLSD's
    weight in place of its tanh and its two averages of the loss.
    """

    @section
    class Config(ContrastiveConfig):
        num_wrong: int = Field(
            default=4, ge=1, description="Most wrong references per rollout, K. Each one costs a teacher pass."
        )

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self._wrong_views = tuple(f"wrong_{number}" for number in range(1, self.config.num_wrong + 1))
        self.views = ("correct", *self._wrong_views)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        number = self.config.num_wrong if self.is_weighted(group.step) else 0
        references: dict[str, list[Reference | None]] = {view: [] for view in self.views}
        references["correct"].extend(positive_references(group, self.positive))
        for wrong in wrong_references(group, self.config.negative, number):  # of one rollout, at most `number`
            for index, view in enumerate(self._wrong_views):
                references[view].append(wrong[index] if index < len(wrong) else None)
        return references

    def contrasted(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Returns log P_correct and the log of the mean over a row's own wrong references.

        The student takes their place if the row has none.
        """
        log_sum: Tensor | None = None  # (B, T) log sum_k P_wrong_k over the row's references; -inf without any
        count = batch.group_ids.new_zeros(batch.group_ids.shape)  # (B,) how many the row has
        for view in self._wrong_views:
            has_reference = batch.has_reference[view]
            log_wrong = batch.teacher_log_probs[view].where(has_reference.unsqueeze(1), -math.inf)
            log_sum = log_wrong if log_sum is None else log_sum.logaddexp(log_wrong)
            count = count + has_reference
        assert log_sum is not None, "num_wrong is at least 1"
        log_count = count.clamp(min=1).to(log_sum.dtype).log()
        log_mean = log_sum - log_count.unsqueeze(1)
        log_student = batch.teacher_log_probs[self._wrong_views[0]]  # of rows without a reference
        log_wrong = log_mean.where((count > 0).unsqueeze(1), log_student)
        return batch.teacher_log_probs["correct"], log_wrong
