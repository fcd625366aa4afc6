"""Registers a control of the study: cepo with its two teachers exchanged (`algorithm.adv_estimator=inverted_cepo`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.types import TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("inverted_cepo")
class InvertedCepo(Cepo):
    """`w_t = clip(exp(-sign(A) delta_t), 1 - r, 1 + r)`: tokens that cepo credits more than others are credited less."""

    def contrasted(self, batch: TokenBatch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Returns log P_wrong and log P_correct."""
        log_correct, log_wrong = super().contrasted(batch)
        return log_wrong, log_correct
