"""Estimates the KL from the initial weights at each token, and adapts its coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.losses.base import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")


def kl_penalty(
    log_probs: Float[Tensor, "B T"], reference_log_probs: Float[Tensor, "B T"], penalty: str
) -> Float[Tensor, "B T"]:
    """Estimates KL(P_S || P_reference) at each sampled token in nats, with x = log_probs and y = reference_log_probs.

    `kl`: x - y. `abs`: |x - y|. `mse`: (x - y)^2 / 2. `low_var_kl`: e^z - z - 1 with z = y - x, never negative, and
    unbiased with low variance except for its bounds: z is clamped to +-20, the result to 10. Source: Schulman 2020,
    EasyR1's bounds.
    """
    difference = log_probs - reference_log_probs
    if penalty == "kl":
        return difference
    if penalty == "abs":
        return difference.abs()
    if penalty == "mse":
        return 0.5 * difference.square()
    assert penalty == "low_var_kl", penalty
    exponent = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (exponent.expm1() - exponent).clamp(max=10.0)


def adapted_coefficient(
    coefficient: float, observed_kl: float, *, num_sequences: int, kl_target: float, kl_horizon: float
) -> float:
    """Returns the adaptive KL coefficient after a batch of `num_sequences` whose KL per token is `observed_kl`.

    `c * (1 + clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon)`, at least 0. Source: Ziegler et al. 2019.
    """
    bounded = min(max(observed_kl / kl_target - 1.0, -0.2), 0.2)
    return coefficient * max(0.0, 1.0 + bounded * num_sequences / kl_horizon)
