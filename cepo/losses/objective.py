"""Computes the objective of an optimizer batch (policy loss, KL, divergence for each token) and the critic's loss.

The aggregation of token losses does not depend on micro-batches, padding, packing or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.divergence import LOG_RATIO_BOUND, bounded_ratio, distillation_losses
from cepo.metrics import Metric, Metrics, max_value, mean_of, observations, share_of_mean
from cepo.types import DivergenceConfig

HIGHER, LOWER = "actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower"
LOSS_TYPES = ("default", "gspo", "gspo_token", "cispo", "sapo")
AGGREGATIONS = ("token", "seq", "seq_sum", "constant")
KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")


@dataclass(frozen=True)
class LossDenominators:
    """The totals by which losses are divided: of the optimizer batch on all ranks, including rows without gradient."""

    num_tokens: int
    num_sequences: int
    max_response_length: int


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


@dataclass(frozen=True, kw_only=True)
class ObjectiveTerms:
    """The constant inputs of the objective for the tokens of one micro-batch, all (R, T).

    Attributes:
        weight: each token's weight in the aggregation, 0 on padding.
        reference_log_probs: under the initial weights; None without a KL in the loss.
        sampled_log_probs: by the rollout engine, for importance weights.
        divergence_weight: the method's weight of the divergence; None for methods without one.
    """

    old_log_probs: Float[Tensor, "R T"]
    advantages: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    weight: Float[Tensor, "R T"]
    sampled_log_probs: Float[Tensor, "R T"] | None = None
    reference_log_probs: Float[Tensor, "R T"] | None = None
    divergence_weight: Float[Tensor, "R T"] | None = None


def objective(
    log_probs: Float[Tensor, "R T"],
    terms: ObjectiveTerms,
    settings: ObjectiveSettings,
    *,
    teacher_divergence: Float[Tensor, "R T"] | None = None,
    divergence_settings: DivergenceConfig | None = None,
    reference_divergence: Float[Tensor, "R T"] | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Computes `sum_t weight_t (policy_loss_t + kl_coefficient KL_t + divergence_weight_t divergence_t)` with metrics.

    Losses and clip fractions in the metrics are shares of the optimizer step's, to be merged with `step_metrics`.

    Args:
        log_probs: of the sampled tokens, with gradient.
        teacher_divergence: between student and teacher, with gradient; None without distillation.
        reference_divergence: KL(P_student || P_reference) over the vocabulary, with gradient, for the penalty `full`.
    """
    old, mask, weight = terms.old_log_probs, terms.response_mask, terms.weight
    losses = policy_loss(log_probs, old, terms.advantages, mask, settings)
    metrics = policy_metrics(log_probs.detach(), old, terms.advantages, mask, settings)
    if settings.rollout_is != "none":
        assert terms.sampled_log_probs is not None, "importance weights compare with the rollout engine"
        importance = importance_weights(old, terms.sampled_log_probs, settings)
        losses = losses * importance
        metrics["rollout/is_weight"] = mean_of(importance, mask)
    policy = (losses * weight).sum()
    metrics["actor/pg_loss"] = share_of_mean(float(policy.detach()))
    total = policy
    penalties = reference_divergence
    if penalties is None and terms.reference_log_probs is not None:
        penalties = kl_penalty(log_probs, terms.reference_log_probs, settings.kl_penalty)
    if penalties is not None and settings.kl_coefficient > 0:
        metrics["actor/kl_loss"] = mean_of(penalties.detach(), mask)
        total = total + settings.kl_coefficient * (penalties * weight).sum()
    if teacher_divergence is not None:
        assert terms.divergence_weight is not None and divergence_settings is not None, "a divergence has a weight"
        distilled, of_divergence = distillation_losses(
            teacher_divergence, log_probs, old, terms.divergence_weight, divergence_settings
        )
        distillation = (distilled * weight).sum()
        metrics |= of_divergence
        metrics["actor/distillation_loss"] = share_of_mean(float(distillation.detach()))
        total = total + distillation
    return total, metrics


def step_metrics(settings: ObjectiveSettings, denominators: LossDenominators, *, distils: bool) -> Metrics:
    """Returns the denominators for the shares of an optimizer step's micro-batches and ranks, once per step.

    Losses become means over optimizer steps, clip fractions shares of all response tokens; rows without gradient add 0.
    """
    metrics: Metrics = {"actor/pg_loss": observations()}
    if distils:
        metrics["actor/distillation_loss"] = observations()
    if settings.loss_type != "sapo":
        metrics[HIGHER] = observations(denominators.num_tokens)
        if settings.loss_type != "cispo" and settings.clip_ratio_dual is not None:
            metrics[LOWER] = observations(denominators.num_tokens)
    return metrics


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


def kl_penalty(
    log_probs: Float[Tensor, "B T"], reference_log_probs: Float[Tensor, "B T"], penalty: str
) -> Float[Tensor, "B T"]:
    """Estimates KL(P_S || P_reference) at each sampled token in nats, with x = log_probs and y = reference_log_probs.

    `kl`: x - y. `abs`: |x - y|. `mse`: (x - y)^2 / 2. `low_var_kl`: e^z - z - 1 with z = y - x, never negative, and
    unbiased with low variance except for its bounds: z is clamped to +-20, the result to 10. Source: Schulman 2020,
    EasyR1's bounds. For the KL over the vocabulary see `chunked_divergence` with kind `reverse_kl`.
    """
    difference = log_probs - reference_log_probs
    if penalty == "kl":
        return difference
    if penalty == "abs":
        return difference.abs()
    if penalty == "mse":
        return 0.5 * difference.square()
    assert penalty == "low_var_kl", penalty
    exponent = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (exponent.expm1() - exponent).clamp(max=10.0)


def adapted_coefficient(
    coefficient: float, observed_kl: float, *, num_sequences: int, kl_target: float, kl_horizon: float
) -> float:
    """Returns the adaptive KL coefficient after a batch of `num_sequences` whose KL per token is `observed_kl`.

    `c * (1 + clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon)`, at least 0. Source: Ziegler et al. 2019.
    """
    bounded = min(max(observed_kl / kl_target - 1.0, -0.2), 0.2)
    return coefficient * max(0.0, 1.0 + bounded * num_sequences / kl_horizon)


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
