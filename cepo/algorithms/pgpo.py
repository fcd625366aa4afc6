"""Implements PGPO, which moves a response's advantage from tokens that follow from the text to those that need the image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.losses.kl import kl_penalty
from cepo.metrics import mean_of
from cepo.sections.fields import NotNegative, section
from cepo.types import ImageReference, Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

EQUAL_DEPENDENCE = 1e-6
"""Responses whose u_t differ by no more keep their advantage: the gate divides by this difference, rounding included."""


@register_estimator("pgpo")
class Pgpo(GroupRelativeEstimator):
    """Weights GRPO's advantage A by a gate on each token's dependence on the image, whose mean over a response is 1.

        k_t     = e^(-d) + d - 1,   d = log P_student(y_t) - log P_blind(y_t)       at most 10
        I_t     = (u_t - min u) / (max u - min u),   u_t = log(1 + k_t)             over the response
        g_t     = I_t / tau                             where I_t < tau
                  1 + beta (I_t - tau) / (1 - tau)      elsewhere
        A_hat_t = A g_t T / sum_s g_s                                               T tokens

    `P_blind` is the policy with the student's prompt without its images; tau is `threshold`, beta `boost`. Degenerate
    cases: equal k_t, and problems without images, are GRPO. Source: PGPO (arXiv 2604.01840), with the sampled token's
    estimate of its divergence; no code is released.
    """

    @section
    class Config(GroupConfig):
        threshold: Annotated[float, Field(gt=0, lt=1)] = 0.4
        """Normalised dependence tau below which a token loses advantage."""
        boost: NotNegative = 2.0
        """How much more than 1 the gate is at the token that depends most, beta."""

    config: Config
    views = ("blind",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"blind": [ImageReference()] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask
        sees_image = mask & batch.has_reference["blind"].unsqueeze(1)  # (B, T)
        log_student = batch.old_log_probs.detach()
        log_blind = batch.teacher_log_probs["blind"].detach()
        dependence = kl_penalty(log_student, log_blind, "low_var_kl").where(mask, 0.0)  # k_t
        gate = self._gate(dependence.double().log1p(), mask)
        weight = gate.where(sees_image, 1.0)  # float64
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        shaped = (advantages.double().unsqueeze(1) * weight).to(batch.rewards.dtype)
        metrics = statistics.group_metrics(batch)
        metrics["perception/dependence"] = mean_of(dependence, sees_image)
        metrics["perception/boosted"] = mean_of((weight > 1.0).float(), sees_image)
        return TokenSignal(
            advantages=shaped.where(mask, 0.0),
            metrics=metrics,
            diagnostics={
                "delta": (log_student - log_blind).where(mask, 0.0),
                "weight": weight.to(dependence.dtype).where(mask, 0.0),
            },
        )

    def _gate(self, dependence: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Returns the gate of mean 1 from u_t; 1 in responses whose tokens depend equally."""
        tau = self.config.threshold
        beta = self.config.boost
        lowest = dependence.masked_fill(~mask, math.inf).amin(dim=1, keepdim=True)  # (B, 1)
        highest = dependence.masked_fill(~mask, -math.inf).amax(dim=1, keepdim=True)
        spread = highest - lowest
        normalised = (dependence - lowest) / spread.clamp(min=EQUAL_DEPENDENCE)  # I_t
        below = normalised / tau
        above = 1.0 + beta * (normalised - tau) / (1.0 - tau)
        gate = above.where(normalised >= tau, below)  # g_t
        mean = statistics.response_means(gate, mask).unsqueeze(1)
        return (gate / mean).where(spread > EQUAL_DEPENDENCE, 1.0)
