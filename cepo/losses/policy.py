"""Computes policy losses of tokens, importance weights for the engine's log-probs, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.divergence import bounded_ratio
from cepo.metrics import Metric, Metrics, max_value, mean_of, share_of_mean

HIGHER, LOWER = "actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower"
LOSS_TYPES = ("default", "gspo", "gspo_token", "cispo", "sapo")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The settings of an objective; all but the last are named as in `worker.actor` and `algorithm`.

    `1 - clip_ratio_low` and `1 + clip_ratio_high` bound the ratio; `clip_ratio_dual` (> 1; None: off) bounds losses with
    A < 0. `tau_*` are the gate temperatures of `sapo`. `rollout_is` (none, truncate or mask) with its threshold (> 1)
    corrects for the gap between engine and trainer. `kl_coefficient` is 0 if the KL is off or part of the reward.
    """

    loss_type: str = "default"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_dual: float | None = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    rollout_is: str = "none"
    rollout_is_threshold: float = 2.0
    kl_penalty: str = "kl"
    kl_coefficient: float = 0.0


def policy_loss(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    settings: ObjectiveSettings,
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
    loss_type = settings.loss_type
    if loss_type.startswith("gspo"):
        log_ratio = _sequence_log_ratio(log_probs, old_log_probs, response_mask)
        if loss_type == "gspo_token":
            log_ratio = log_ratio.detach() + log_probs - log_probs.detach()
        return _clipped_surrogate(bounded_ratio(log_ratio).expand_as(log_probs), advantages, settings)
    ratio = bounded_ratio(log_probs - old_log_probs)
    if loss_type == "cispo":
        return -advantages * _clipped_ratio(ratio.detach(), settings) * log_probs
    if loss_type == "sapo":
        tau = torch.full_like(ratio, settings.tau_positive).where(advantages >= 0, settings.tau_negative)
        return -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    assert loss_type == "default", loss_type
    return _clipped_surrogate(ratio, advantages, settings)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * _clipped_ratio(ratio, settings))
    if settings.clip_ratio_dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * settings.clip_ratio_dual), loss)


def _clipped_ratio(ratio: Tensor, settings: ObjectiveSettings) -> Tensor:
    return ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)


def importance_weights(
    old_log_probs: Float[Tensor, "B T"], sampled_log_probs: Float[Tensor, "B T"], settings: ObjectiveSettings
) -> Float[Tensor, "B T"]:
    """Computes each token's weight in the policy loss, which corrects for differing log-probs of engine and trainer.

    `rho = P_trainer(y_t) / P_engine(y_t)` with the weights before the update, C is the threshold. `truncate`:
    min(rho, C) (Yao et al. 2025, verl). `mask`: rho within [1/C, C], else 0 (IcePop, Ling team 2025).
    """
    rho = bounded_ratio(old_log_probs - sampled_log_probs)
    threshold = settings.rollout_is_threshold
    if settings.rollout_is == "truncate":
        return rho.clamp(max=threshold)
    assert settings.rollout_is == "mask", settings.rollout_is
    return rho.where((rho >= 1.0 / threshold) & (rho <= threshold), 0.0)


@torch.no_grad()
def policy_metrics(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    settings: ObjectiveSettings,
) -> Metrics:
    """Returns the clip counts, the k1 estimate of KL(old || new) in nats, and mean -log P as a proxy of the entropy.

    Clip counts are of the loss type's own ratio and become fractions by `step_metrics`. `sapo` has none; `cispo` counts
    tokens with non-zero advantage whose ratio is outside the clip range. The others are means over these tokens.
    """
    metrics: Metrics = {
        "actor/live_ppo_kl": mean_of(old_log_probs - log_probs, response_mask),
        "actor/live_entropy": mean_of(-log_probs, response_mask),
    }
    if settings.loss_type == "sapo":
        return metrics
    if settings.loss_type.startswith("gspo"):
        ratio = bounded_ratio(_sequence_log_ratio(log_probs, old_log_probs, response_mask)).expand_as(log_probs)
    else:
        ratio = bounded_ratio(log_probs - old_log_probs)

    def count(chosen: Tensor) -> Metric:
        return share_of_mean(float((chosen & response_mask).sum()))

    clipped = _clipped_ratio(ratio, settings)
    if settings.loss_type == "cispo":
        return metrics | {HIGHER: count((ratio != clipped) & (advantages != 0))}
    plain = -advantages * ratio
    highest = torch.maximum(plain, -advantages * clipped)
    metrics[HIGHER] = count(plain < highest)
    if settings.clip_ratio_dual is not None:
        metrics[LOWER] = count((advantages < 0) & (highest > -advantages * settings.clip_ratio_dual))
    return metrics


def _sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, 1), the mean of log rho over each response."""
    total = (log_probs - old_log_probs).where(response_mask, 0.0).sum(dim=1, keepdim=True)
    return total / response_mask.sum(dim=1, keepdim=True).clamp(min=1)


def agreement_metrics(
    sampled: Float[Tensor, "R T"], scored: Float[Tensor, "R T"], counted: Bool[Tensor, "R T"], temperature: float
) -> Metrics:
    """Returns the mean and maximum of |log P_engine - log P_trainer| in nats over the counted tokens, and their KL.

    `rollout/kl` estimates KL(engine || trainer) by the mean of `rho - 1 - log rho`, with rho = P_trainer / P_engine.
    The result is empty unless the temperature is 1, because the engine's log-probs are at temperature 1.
    """
    if temperature != 1.0 or not bool(counted.any()):
        return {}
    log_ratio = scored - sampled
    gap = log_ratio.abs()
    return {
        "rollout/log_prob_gap_mean": mean_of(gap, counted),
        "rollout/log_prob_gap_max": max_value(float(gap[counted].max())),
        "rollout/kl": mean_of(bounded_ratio(log_ratio) - 1.0 - log_ratio, counted),
    }
