"""Clipped surrogates and their aggregation, independent of micro-batches, padding, packing and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.errors import ConfigError, did_you_mean
from cepo.metrics import Metrics, mean_of

LOG_RATIO_BOUND = 20.0
"""|log ratio| is cut here before the exponential: e^20 is far outside every clip range and far inside float32."""
AGGREGATIONS = ("token", "seq", "seq_sum", "constant")


@dataclass(frozen=True)
class ClipRange:
    """`1 - low` and `1 + high` bound the ratio; `dual` (> 1, None for off) bounds the loss of negative advantages."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = 3.0


@dataclass(frozen=True)
class LossDenominators:
    """Totals over the whole optimizer batch on all ranks, rows without gradient included."""

    num_tokens: int
    num_sequences: int
    max_response_length: int


def clipped_surrogate(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clip: ClipRange,
) -> Float[Tensor, "B T"]:
    """Token losses of PPO's clipped objective with dual clip.

    `ratio = exp(log_probs - old_log_probs)`, `L1 = -A ratio`, `L2 = -A clip(ratio, 1 - low, 1 + high)`, `H = max(L1, L2)`;
    the loss is H for A >= 0 and `min(H, -A dual)` for A < 0.
    Source: PPO (Schulman et al. 2017), dual clip (Ye et al. 2020), asymmetric bounds (DAPO, Yu et al. 2025).
    At ratio 1 its gradient in the logits z of token t is `-A_t (onehot(y_t) - softmax(z / temperature)) / temperature`.
    """
    ratio = _ratio(log_probs, old_log_probs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = torch.maximum(plain, clipped)
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    return loss


def token_weights(
    response_mask: Bool[Tensor, "B T"], aggregation: str, denominators: LossDenominators
) -> Float[Tensor, "B T"]:
    """Weights with which the aggregated loss is `sum(token_loss * weights)` over all micro-batches and ranks.

    `token`: 1 / num_tokens. `seq`: 1 / (num_sequences * length_i), the paper's formula. `seq_sum`: 1 / num_sequences.
    `constant`: 1 / (num_sequences * max_response_length) (Dr. GRPO). Padding weighs exactly 0.

    Raises:
        ConfigError: unknown aggregation.
    """
    mask = response_mask.float()
    if aggregation == "token":
        return mask / denominators.num_tokens
    if aggregation == "seq":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        return mask / lengths / denominators.num_sequences
    if aggregation == "seq_sum":
        return mask / denominators.num_sequences
    if aggregation == "constant":
        return mask / (denominators.num_sequences * denominators.max_response_length)
    raise ConfigError(
        f"worker.actor.loss_avg_mode is '{aggregation}'.{did_you_mean(aggregation, AGGREGATIONS)} "
        f"Accepted: {', '.join(AGGREGATIONS)}"
    )


@torch.no_grad()
def surrogate_metrics(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip: ClipRange,
) -> Metrics:
    """Clip fractions, the k1 estimate of KL(old || new) in nats, and the sampled-token entropy proxy, over response tokens."""
    ratio = _ratio(log_probs, old_log_probs)
    plain = -advantages * ratio
    highest = torch.maximum(plain, -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    metrics: Metrics = {
        "actor/pg_clipfrac_higher": mean_of((plain < highest).float(), response_mask),
        "actor/ppo_kl": mean_of(old_log_probs - log_probs, response_mask),
        "actor/entropy_loss": mean_of(-log_probs, response_mask),
    }
    if clip.dual is not None:
        bounded = (advantages < 0) & (highest > -advantages * clip.dual)
        metrics["actor/pg_clipfrac_lower"] = mean_of(bounded.float(), response_mask)
    return metrics


def _ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
