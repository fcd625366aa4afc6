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
        wrong = wrong_references(group, self.config.negative, number)
        sides = {
            view: [found[index] if index < len(found) else None for found in wrong]
            for index, view in enumerate(self._wrong_views)
        }
        return {"correct": positive_references(group, self.positive), **sides}

    def contrasted(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Returns log P_correct and the log of the mean over a row's own wrong references.

        The student takes their place if the row has none.
        """
        first, *others = self._wrong_views
        count = batch.has_reference[first].clone().long()
        total = batch.teacher_log_probs[first].where(batch.has_reference[first].unsqueeze(1), -math.inf)
        for view in others:
            shown = batch.has_reference[view]
            total = total.logaddexp(batch.teacher_log_probs[view].where(shown.unsqueeze(1), -math.inf))
            count = count + shown
        mean = total - count.clamp(min=1).to(total.dtype).log().unsqueeze(1)
        wrong = mean.where((count > 0).unsqueeze(1), batch.teacher_log_probs[first])
        return batch.teacher_log_probs["correct"], wrong
