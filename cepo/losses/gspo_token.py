"""Implements GSPO-token, which has GSPO's ratio and each token's own gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.losses.base import PolicyTokens, bounded_ratio
from cepo.losses.gspo import Gspo, sequence_log_ratio
from cepo.losses.registry import register_loss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_loss("gspo_token")
class GspoToken(Gspo):
    """Computes GSPO's loss, but the gradient of each token's ratio flows through the token's own log-prob.

    `log rho_t = sg(mean of log rho) + log P(y_t) - sg(log P(y_t))`, where sg has no gradient. Source: Zheng et al. 2025.
    """

    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        log_probs = tokens.log_probs
        log_ratio = sequence_log_ratio(tokens).detach() + log_probs - log_probs.detach()
        return self.clipped_surrogate(bounded_ratio(log_ratio), tokens.advantages)
