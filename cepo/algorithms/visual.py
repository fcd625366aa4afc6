"""Implements visual evidence: tokens that the image makes likelier carry more of the advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import WeightedEstimator, register_estimator
from cepo.algorithms.settings import WeightedConfig
from cepo.types import ImageReference, Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


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
        return {"blind": [ImageReference()] * len(group.rollouts)}

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        return batch.old_log_probs - batch.teacher_log_probs["blind"]
