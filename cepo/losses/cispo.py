"""Implements CISPO, which clips the ratio's value and keeps every token's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cepo.losses.base import PolicyLoss, PolicyTokens
from cepo.losses.ppo import HIGHER, clipped_ratio
from cepo.losses.registry import register_loss
from cepo.losses.settings import ClipConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@register_loss("cispo")
class Cispo(PolicyLoss):
    """Computes `-A sg(clip(rho, 1 - low, 1 + high)) log P(y_t)`, where sg has no gradient. Source: MiniMax 2025."""

    Config = ClipConfig
    fractions = (HIGHER,)

    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        weight = clipped_ratio(tokens.ratio.detach(), self.config)
        return -tokens.advantages * weight * tokens.log_probs

    def counted(self, tokens: PolicyTokens) -> Mapping[str, Bool[Tensor, "R T"]]:
        """Counts tokens with non-zero advantage whose ratio is outside the clip range."""
        is_clipped = tokens.ratio != clipped_ratio(tokens.ratio, self.config)
        return {HIGHER: is_clipped & (tokens.advantages != 0)}
