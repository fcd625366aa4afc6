"""Implements SAPO, which replaces the clip by a soft gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.losses.base import PolicyLoss, PolicyTokens
from cepo.losses.registry import register_loss
from cepo.losses.settings import GateConfig

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_loss("sapo")
class Sapo(PolicyLoss):
    """Computes `-A (4 / tau) sigmoid(tau (rho - 1))`, with `tau_positive` for A >= 0 and `tau_negative` for A < 0.

    No token is clipped, so the loss counts none. Source: Gao et al. 2025.
    """

    Config = GateConfig

    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        ratio = tokens.ratio
        positive = ratio.new_full(ratio.shape, self.config.tau_positive)
        tau = positive.where(tokens.advantages >= 0, self.config.tau_negative)
        gate = (tau * (ratio - 1.0)).sigmoid()
        return -tokens.advantages * (4.0 / tau) * gate
