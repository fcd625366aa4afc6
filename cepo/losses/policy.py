"""Computes policy losses and their aggregation, which does not depend on micro-batches, padding, packing or ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.metrics import Metric, Metrics, mean_of, share_of_mean

LOG_RATIO_BOUND = 20.0
"""Bound of |log ratio| before the exponential: e^20 is far outside every clip range and far inside float32."""
HIGHER, LOWER = "actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower"
LOSS_TYPES = ("default", "gspo", "gspo_token", "cispo", "sapo")
AGGREGATIONS = ("token", "seq", "seq_sum", "constant")


@dataclass(frozen=True)
class ClipRange:
    """The clip range: `1 - low` and `1 + high` bound the ratio; `dual` (> 1; None: off) bounds losses with A < 0."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = 3.0


@dataclass(frozen=True)
class LossDenominators:
    """The totals by which losses are divided: of the optimizer batch on all ranks, including rows without gradient."""

    num_tokens: int
    num_sequences: int
    max_response_length: int


@dataclass(frozen=True)
class RolloutCorrection:
    """The correction for the gap between engine and trainer: `kind` is none, truncate or mask; `threshold` > 1."""

    kind: str = "none"
    threshold: float = 2.0


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings:
    """The settings of the policy losses: clip range, correction for the engine, and gate temperatures of `sapo`."""

    clip: ClipRange = ClipRange()
    correction: RolloutCorrection = RolloutCorrection()
    tau_positive: float = 1.0
    tau_negative: float = 1.05


def policy_loss(
    loss_type: str,
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    settings: PolicyLossSettings,
) -> Float[Tensor, "B T"]:
    """Computes token losses, to be aggregated with `token_weights`, which give padding weight 0.

    A is the advantage, `rho = exp(log_probs - old_log_probs)`, `clip(.)` is to [1 - low, 1 + high], sg has no gradient:

    - `default`: PPO's clipped objective with dual clip, `H = max(-A rho, -A clip(rho))` for A >= 0 and
      `min(H, -A dual)` for A < 0. At rho = 1 its gradient in the logits z of token t is
      `-A_t (onehot(y_t) - softmax(z / temperature)) / temperature`. Schulman et al. 2017, dual clip: Ye et al. 2020,
      asymmetric bounds: DAPO, Yu et al. 2025.
    - `gspo`: the same with one ratio per sequence, exp(mean over its tokens of log rho). Zheng et al. 2025.
    - `gspo_token`: the same value, but the gradient of each token's ratio flows through its own log-prob.
    - `cispo`: `-A sg(clip(rho)) log_probs`; every token keeps its gradient. MiniMax 2025.
    - `sapo`: `-A (4 / tau) sigmoid(tau (rho - 1))`, tau by the sign of A; a soft gate, no clip. Gao et al. 2025.

    At `log_probs = old_log_probs` all have the same gradient except `gspo`, which spreads it over the sequence.
    """
    clip = settings.clip
    if loss_type.startswith("gspo"):
        log_ratio = _sequence_log_ratio(log_probs, old_log_probs, response_mask)
        if loss_type == "gspo_token":
            log_ratio = log_ratio.detach() + log_probs - log_probs.detach()
        return _clipped_surrogate(bounded_ratio(log_ratio).expand_as(log_probs), advantages, clip)
    ratio = bounded_ratio(log_probs - old_log_probs)
    if loss_type == "cispo":
        return -advantages * ratio.detach().clamp(1.0 - clip.low, 1.0 + clip.high) * log_probs
    if loss_type == "sapo":
        tau = torch.full_like(ratio, settings.tau_positive).where(advantages >= 0, settings.tau_negative)
        return -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    assert loss_type == "default", loss_type
    return _clipped_surrogate(ratio, advantages, clip)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    return loss


def importance_weights(
    old_log_probs: Float[Tensor, "B T"], sampled_log_probs: Float[Tensor, "B T"], correction: RolloutCorrection
) -> Float[Tensor, "B T"]:
    """Computes the weight of each token's policy loss that corrects for differing log-probs of engine and trainer.

    `rho = P_trainer(y_t) / P_engine(y_t)` with the weights before the update, C is the threshold.
    `truncate`: min(rho, C); but for the bound, the gradient is that of samples from the trainer. `mask`: rho within
    [1/C, C], else 0. Source: truncated importance sampling (Yao et al. 2025, verl), masking (IcePop, Ling team 2025).
    """
    rho = bounded_ratio(old_log_probs - sampled_log_probs)
    if correction.kind == "truncate":
        return rho.clamp(max=correction.threshold)
    assert correction.kind == "mask", correction.kind
    return rho.where((rho >= 1.0 / correction.threshold) & (rho <= correction.threshold), 0.0)


def token_weights(
    response_mask: Bool[Tensor, "B T"], aggregation: str, denominators: LossDenominators
) -> Float[Tensor, "B T"]:
    """Returns the token weights of the aggregated loss, `sum(token_loss * weights)` over all micro-batches and ranks.

    `token`: 1 / num_tokens. `seq`: 1 / (num_sequences * length_i), the paper's formula. `seq_sum`: 1 / num_sequences.
    `constant`: 1 / (num_sequences * max_response_length) (Dr. GRPO). Padding has weight exactly 0.
    """
    mask = response_mask.float()
    if aggregation == "token":
        return mask / denominators.num_tokens
    if aggregation == "seq":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        return mask / lengths / denominators.num_sequences
    if aggregation == "seq_sum":
        return mask / denominators.num_sequences
    assert aggregation == "constant", aggregation
    return mask / (denominators.num_sequences * denominators.max_response_length)


@torch.no_grad()
def policy_metrics(
    loss_type: str,
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    settings: PolicyLossSettings,
) -> Metrics:
    """Returns the clip counts, the k1 estimate of KL(old || new) in nats, and mean -log P as a proxy of the entropy.

    Clip counts are of the loss type's own ratio and become fractions of all response tokens of an optimizer step
    (`objective.step_metrics`). `sapo` has none; `cispo` counts tokens with non-zero advantage whose ratio is outside
    the clip range. The other two metrics are means over the tokens of these rows, the live ones.
    """
    clip = settings.clip
    metrics: Metrics = {
        "actor/live_ppo_kl": mean_of(old_log_probs - log_probs, response_mask),
        "actor/live_entropy": mean_of(-log_probs, response_mask),
    }
    if loss_type == "sapo":
        return metrics
    if loss_type.startswith("gspo"):
        ratio = bounded_ratio(_sequence_log_ratio(log_probs, old_log_probs, response_mask)).expand_as(log_probs)
    else:
        ratio = bounded_ratio(log_probs - old_log_probs)
    if loss_type == "cispo":
        outside = ((ratio < 1.0 - settings.clip.low) | (ratio > 1.0 + settings.clip.high)) & (advantages != 0)
        return metrics | {HIGHER: _count(outside, response_mask)}
    plain = -advantages * ratio
    highest = torch.maximum(plain, -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    metrics[HIGHER] = _count(plain < highest, response_mask)
    if clip.dual is not None:
        metrics[LOWER] = _count((advantages < 0) & (highest > -advantages * clip.dual), response_mask)
    return metrics


def clip_metrics(loss_type: str, clip: ClipRange) -> tuple[str, ...]:
    """Returns the names of the clip fractions in `policy_metrics`."""
    if loss_type == "sapo":
        return ()
    return (HIGHER,) if loss_type == "cispo" or clip.dual is None else (HIGHER, LOWER)


def _count(chosen: Tensor, response_mask: Tensor) -> Metric:
    return share_of_mean(float((chosen & response_mask).sum()))


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, 1), the mean of log rho over each response."""
    total = (log_probs - old_log_probs).where(response_mask, 0.0).sum(dim=1, keepdim=True)
    return total / response_mask.sum(dim=1, keepdim=True).clamp(min=1)
