"""Computes the critic's loss and its metrics."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.metrics import Metrics, mean_of


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    clip: float,
) -> Float[Tensor, "B T"]:
    """Returns `max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2` per token, to aggregate by `token_weights`.

    Source: PPO's value clip, as in EasyR1 (`worker.critic.cliprange_value`).
    """
    return 0.5 * torch.maximum((values - returns).square(), (_clipped(values, old_values, clip) - returns).square())


@torch.no_grad()
def value_metrics(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip: float,
) -> Metrics:
    """Returns the share of response tokens whose clipped value has the larger error, and the mean predicted value."""
    worse = (_clipped(values, old_values, clip) - returns).square() > (values - returns).square()
    return {
        "critic/vf_clipfrac": mean_of(worse.float(), response_mask),
        "critic/vpred_mean": mean_of(values, response_mask),
    }


def _clipped(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    return torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
