"""Implements RLCSD, which contrasts the right answer with the mean of several wrong ones of other rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.algorithms.evidence import log_mean_probability
from cepo.algorithms.references import in_views, positive_references, wrong_references, wrong_views
from cepo.algorithms.settings import ContrastiveConfig
from cepo.sections.fields import section
from cepo.types import Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("rlcsd")
class Rlcsd(Cepo):
    """Weights GRPO's advantage by `delta_t = log P_correct(y_t) - log (1/K) sum_k P_wrong_k(y_t)`.

    The wrong references come from up to K other rollouts of the group, with different texts. Degenerate cases: one
    wrong reference gives CEPO exactly, none gives RLSD. Source: the evidence of RLCSD (arXiv 2606.11709), with RLSD's
    weight; `rlcsd_released` has its own.
    """

    @section
    class Config(ContrastiveConfig):
        num_wrong: int = Field(
            default=4, ge=1, description="Most wrong references per rollout, K. Each one costs a teacher pass."
        )

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def views(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("correct", *wrong_views(self.config.num_wrong))

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        number = self.config.num_wrong if self.is_weighted(group.step) else 0
        wrong = in_views(wrong_references(group, self.config.negative, number), self.views[1:])
        return {"correct": positive_references(group, self.positive), **wrong}

    def contrasted(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Returns log P_correct and the log of the mean over a row's own wrong references.

        The student takes their place if the row has none.
        """
        return batch.teacher_log_probs["correct"], log_mean_probability(batch, self.views[1:])
