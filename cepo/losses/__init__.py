"""Computes losses over response tokens, with pure functions of tensors: no model and no collective call."""

from cepo.losses import cispo, gspo, ppo, sapo  # noqa: F401  # pyright: ignore[reportUnusedImport]
from cepo.losses.base import PolicyLoss, PolicyTokens
from cepo.losses.registry import available_losses, build_loss, loss_class, register_loss

__all__ = ["PolicyLoss", "PolicyTokens", "available_losses", "build_loss", "loss_class", "register_loss"]
