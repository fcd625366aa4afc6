"""Registers the contrast gate on wrong responses alone."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from cepo.algorithms import register_estimator
from cepo.algorithms.contrast_gate import ContrastGate
from cepo.algorithms.evidence import TokenWeights
from cepo.types import TokenBatch


@register_estimator("wrong_gate")
class WrongGate(ContrastGate):
    """`contrast_gate` where A < 0, and `A_t = A` in right responses."""

    def weights(self, delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], batch: TokenBatch) -> TokenWeights:
        gate = super().weights(delta, sign, batch)
        return replace(gate, values=gate.values.where(sign < 0, 1.0))
