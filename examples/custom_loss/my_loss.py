"""Defines a policy loss in one file: a quadratic penalty takes the place of PPO's clip."""

from pydantic import Field
from torch import Tensor

from cepo.losses import PolicyLoss, PolicyTokens, register_loss
from cepo.types import Metrics, mean_of


@register_loss("my_loss")
class MyLoss(PolicyLoss):
    """Computes `-A rho + |A| (rho - 1)^2 / (2 radius)`, which is lowest at `rho = 1 + sign(A) radius`.

    PPO's clipped tokens have no gradient; here a token that has moved too far is pulled back. At rho = 1 the gradient is
    that of PPO, -A. Source: simple policy optimisation (Xie et al. 2024, arXiv 2401.16025).
    """

    class Config:
        radius: float = Field(
            default=0.2, gt=0, description="How far the ratio moves from 1 without being pulled back."
        )

    fractions = ("my_loss/outside_fraction",)

    def token_losses(self, tokens: PolicyTokens) -> Tensor:
        distance = tokens.ratio - 1.0
        penalty = tokens.advantages.abs() * distance.square() / (2.0 * self.config.radius)
        return penalty - tokens.advantages * tokens.ratio

    def counted(self, tokens: PolicyTokens) -> dict[str, Tensor]:
        return {"my_loss/outside_fraction": (tokens.ratio - 1.0).abs() > self.config.radius}

    def metrics(self, tokens: PolicyTokens) -> Metrics:
        return {"my_loss/distance": mean_of((tokens.ratio - 1.0).abs(), tokens.response_mask)}
