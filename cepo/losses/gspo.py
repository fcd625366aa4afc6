"""Implements GSPO, which clips one ratio per response, and GSPO-token, in which each token has a gradient of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.losses.base import PolicyTokens, bounded_ratio
from cepo.losses.ppo import Ppo
from cepo.losses.registry import register_loss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_loss("gspo")
class Gspo(Ppo):
    """Computes PPO's loss with `rho = exp(mean over the response's tokens of log rho_t)` at each of its tokens.

    At `log_probs = old_log_probs` its gradient is spread evenly over the response. Source: Zheng et al. 2025.
    """

    def ratio(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        ratio_of_response = bounded_ratio(sequence_log_ratio(tokens))  # (R, 1)
        return ratio_of_response.expand_as(tokens.log_probs)


@register_loss("gspo_token")
class GspoToken(Gspo):
    """Computes GSPO's loss, but the gradient of each token's ratio flows through the token's own log-prob.

    `log rho_t = sg(mean of log rho) + log P(y_t) - sg(log P(y_t))`, where sg has no gradient. Source: Zheng et al. 2025.
    """

    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        log_probs = tokens.log_probs
        log_ratio = sequence_log_ratio(tokens).detach() + log_probs - log_probs.detach()
        return self.clipped_surrogate(bounded_ratio(log_ratio), tokens.advantages)


def sequence_log_ratio(tokens: PolicyTokens) -> Float[Tensor, "R 1"]:
    """Returns the mean of log rho over each response; 0 for a response without tokens."""
    log_ratio = tokens.log_ratio.where(tokens.response_mask, 0.0)
    total = log_ratio.sum(dim=1, keepdim=True)
    num_tokens = tokens.response_mask.sum(dim=1, keepdim=True)
    return total / num_tokens.clamp(min=1)
