"""Implements PPO's clipped loss with dual clip, the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cepo.losses.base import PolicyLoss, PolicyTokens
from cepo.losses.registry import register_loss
from cepo.losses.settings import DEFAULT_LOSS, ClipConfig, DualClipConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


HIGHER = "actor/pg_clipfrac_higher"
LOWER = "actor/pg_clipfrac_lower"
"""The metrics of clipped tokens."""


def clipped_ratio(ratio: Float[Tensor, "*shape"], config: ClipConfig) -> Float[Tensor, "*shape"]:
    """Returns `clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)`."""
    return ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)


@register_loss(DEFAULT_LOSS)
class Ppo(PolicyLoss):
    """Computes `H = max(-A rho, -A clip(rho, 1 - low, 1 + high))` for A >= 0, and `min(H, -A dual)` for A < 0.

    At rho = 1 its gradient in the logits z of token t is `-A_t (onehot(y_t) - softmax(z / temperature)) / temperature`.
    Without `clip_ratio_dual`, H is the loss of every token. Source: Schulman et al. 2017; dual clip: Ye et al. 2020;
    asymmetric bounds: DAPO, Yu et al. 2025.
    """

    Config = DualClipConfig

    @property
    def fractions(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (HIGHER,) if self.config.clip_ratio_dual is None else (HIGHER, LOWER)

    def ratio(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        """Returns the ratio that is clipped: rho of each token."""
        return tokens.ratio

    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        return self.clipped_surrogate(self.ratio(tokens), tokens.advantages)

    def clipped_surrogate(self, ratio: Float[Tensor, "R T"], advantages: Float[Tensor, "R T"]) -> Float[Tensor, "R T"]:
        """Returns H, or its minimum with the dual bound where A < 0."""
        _, highest = self._plain_and_highest(ratio, advantages)
        dual = self.config.clip_ratio_dual
        if dual is None:
            return highest
        bounded = highest.minimum(-advantages * dual)
        return bounded.where(advantages < 0, highest)

    def _plain_and_highest(
        self, ratio: Float[Tensor, "R T"], advantages: Float[Tensor, "R T"]
    ) -> tuple[Tensor, Tensor]:
        """Returns `-A rho` and H."""
        plain = -advantages * ratio
        clipped = -advantages * clipped_ratio(ratio, self.config)
        return plain, plain.maximum(clipped)

    def counted(self, tokens: PolicyTokens) -> Mapping[str, Bool[Tensor, "R T"]]:
        """Counts tokens whose loss is that of the clipped ratio, and those whose loss is the dual bound."""
        advantages = tokens.advantages
        plain, highest = self._plain_and_highest(self.ratio(tokens), advantages)
        counted = {HIGHER: plain < highest}
        dual = self.config.clip_ratio_dual
        if dual is not None:
            exceeds_bound = highest > -advantages * dual
            counted[LOWER] = exceeds_bound & (advantages < 0)
        return counted
