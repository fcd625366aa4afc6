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
    error, clipped_error = _squared_errors(values, old_values, returns, clip)
    return 0.5 * error.maximum(clipped_error)


@torch.no_grad()
def value_metrics(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip: float,
) -> Metrics:
    """Returns the share of response tokens whose clipped value has the larger error, and the mean predicted value."""
    error, clipped_error = _squared_errors(values, old_values, returns, clip)
    is_worse = clipped_error > error
    return {
        "critic/vf_clipfrac": mean_of(is_worse.float(), response_mask),
        "critic/vpred_mean": mean_of(values, response_mask),
    }


def _squared_errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the squared errors of the values, and of the values within `clip` of the old ones."""
    at_least = old_values - clip
    at_most = old_values + clip
    clipped = values.maximum(at_least).minimum(at_most)
    return (values - returns).square(), (clipped - returns).square()
