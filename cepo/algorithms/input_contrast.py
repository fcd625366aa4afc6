"""Implements the contrast of inputs: tokens that the problem makes likelier than another one carry more of the advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import WeightedEstimator, register_estimator
from cepo.algorithms.settings import WeightedConfig
from cepo.types import PromptReference, Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("input_contrast")
class InputContrast(WeightedEstimator):
    """Weights GRPO's advantage A by the evidence of the response's own problem against another one, token by token.

        delta_t = log P_student(y_t) - log P_other(y_t)
        w_t     = clip(exp(sign(A) delta_t), 1 - r, 1 + r)
        A_hat_t = A ((1 - lambda(k)) + lambda(k) w_t)

    `P_other` is the policy with the whole prompt, images included, of the step's next problem: no answer is shown. The sum
    of delta over a response is a sample of its pointwise mutual information with its problem. Degenerate cases: a step
    with one problem, and a next problem with the same prompt, have delta = 0, hence GRPO. Source: the contrast of inputs
    of CREDIT (arXiv 2605.11613), which subtracts it from a self-teacher's reward, with RLSD's weight.
    """

    Config = WeightedConfig
    views = ("other",)
    reads_other_prompts = True

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"other": [PromptReference()] * len(group.rollouts)}

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        return batch.old_log_probs - batch.teacher_log_probs["other"]
