"""Defines the entropy term of the loss and its coefficient at each step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EntropyTerm:
    """The term `-coefficient(k) sum_t weight_t H_t` of the loss, with the weights of its aggregation.

    A positive coefficient is a bonus, which keeps distributions wide; a negative one is a penalty.

    Attributes:
        coefficient: at step 0.
        final_coefficient: from step `num_steps` on; None if the coefficient is constant.
        num_steps: the steps of the linear change; None for all training steps.
    """

    coefficient: float = 0.0
    final_coefficient: float | None = None
    num_steps: int | None = None

    def coefficient_at(self, step: int, *, total_steps: int) -> float:
        """Returns `c(k) = c_0 + (c_final - c_0) min(1, k / num_steps)` at the 0-based training step k."""
        if self.final_coefficient is None:
            return self.coefficient
        progress = min(1.0, step / max(1, self.num_steps or total_steps))
        return self.coefficient + (self.final_coefficient - self.coefficient) * progress


@dataclass(frozen=True, kw_only=True)
class TokenEntropies:
    """Each token's entropy in nats with gradient, and the coefficient with which the loss subtracts it."""

    values: Float[Tensor, "R T"]
    coefficient: float
