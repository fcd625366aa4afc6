"""Computes KL penalties against the reference policy, for loss or reward, and their fixed or adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.policy import LOG_RATIO_BOUND

KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")
LOW_VARIANCE_BOUND = 10.0
"""Upper bound of `low_var_kl` for a token."""
ADAPTIVE_ERROR_BOUND = 0.2
"""Bound of the observed KL's relative error in the update of the adaptive coefficient."""


def kl_penalty(
    log_probs: Float[Tensor, "B T"], reference_log_probs: Float[Tensor, "B T"], penalty: str
) -> Float[Tensor, "B T"]:
    """Estimates KL(P_S || P_reference) at each sampled token in nats, with x = log_probs and y = reference_log_probs.

    `kl`: x - y. `abs`: |x - y|. `mse`: (x - y)^2 / 2. `low_var_kl`: e^z - z - 1 with z = y - x, never negative, and
    unbiased with low variance except for its bounds: z is clamped to +-20, the result to 10. Source: Schulman 2020,
    EasyR1's bounds. For the KL over the vocabulary see `divergence.chunked_divergence` with kind `reverse_kl`.
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
    return (exponent.expm1() - exponent).clamp(max=LOW_VARIANCE_BOUND)


def penalised_rewards(
    token_level_rewards: Float[Tensor, "B T"],
    penalties: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    coefficient: float,
) -> Float[Tensor, "B T"]:
    """Subtracts the KL from the reward: returns `r_t - coefficient * KL_t` on response tokens, padding unchanged."""
    return token_level_rewards - coefficient * penalties.where(response_mask, 0.0)


@dataclass(frozen=True, kw_only=True)
class KLController:
    """Updates the KL coefficient from the observed KL. The coefficient is the only state, one number in a checkpoint.

    `fixed`: never changes. `adaptive`: `c * (1 + clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon)`, at least
    0. Source: Ziegler et al. 2019.
    """

    kl_type: str = "fixed"
    kl_target: float = 0.1
    kl_horizon: float = 10000.0

    def next_coefficient(self, coefficient: float, observed_kl: float, *, num_sequences: int) -> float:
        """Returns the coefficient after a batch of `num_sequences` with mean token KL `observed_kl`."""
        if self.kl_type == "fixed":
            return coefficient
        error = observed_kl / self.kl_target - 1.0
        bounded = min(max(error, -ADAPTIVE_ERROR_BOUND), ADAPTIVE_ERROR_BOUND)
        return coefficient * max(0.0, 1.0 + bounded * num_sequences / self.kl_horizon)
