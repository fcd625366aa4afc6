"""Computes the objective of an optimizer batch (policy loss, KL, divergence for each token) and the critic's loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.divergence import distillation_losses, distillation_metrics
from cepo.losses.policy import (
    LOG_RATIO_BOUND,
    LossDenominators,
    PolicyLossSettings,
    bounded_ratio,
    clip_metrics,
    importance_weights,
    policy_loss,
    policy_metrics,
)
from cepo.metrics import Metrics, max_value, mean_of, observations, share_of_mean
from cepo.types import DivergenceConfig


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The objective's settings; `kl_coefficient` weighs the KL in the loss, 0 if it is off or part of the reward."""

    loss_type: str = "default"
    policy: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    kl_penalty: str = "kl"
    kl_coefficient: float = 0.0


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
    losses = policy_loss(settings.loss_type, log_probs, old, terms.advantages, mask, settings.policy)
    metrics = policy_metrics(settings.loss_type, log_probs.detach(), old, terms.advantages, mask, settings.policy)
    correction = settings.policy.correction
    if correction.kind != "none":
        assert terms.sampled_log_probs is not None, "importance weights compare with the rollout engine"
        importance = importance_weights(old, terms.sampled_log_probs, correction)
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
        parts = (teacher_divergence, log_probs, old, terms.divergence_weight, divergence_settings)
        distillation = (distillation_losses(*parts) * weight).sum()
        metrics |= distillation_metrics(*parts)
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
    clipped = clip_metrics(settings.loss_type, settings.policy.clip)
    return metrics | {name: observations(denominators.num_tokens) for name in clipped}


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


KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")
LOW_VARIANCE_BOUND = 10.0
"""Upper bound of `low_var_kl` for a token."""
ADAPTIVE_ERROR_BOUND = 0.2
"""Bound of the observed KL's relative error in the update of the adaptive coefficient."""


def kl_penalty(
    log_probs: Float[Tensor, "B T"], reference_log_probs: Float[Tensor, "B T"], penalty: str
) -> Float[Tensor, "B T"]:
    """Estimates KL(P_S || P_reference) at each sampled token in nats, with x = log_probs and y = reference_log_probs.

    `kl`: x - y. `abs`: |x - y|. `mse`: (x - y)^2 / 2. `low_var_kl`: e^z - z - 1 with z = y - x, never negative, and
    unbiased with low variance except for its bounds: z is clamped to +-20, the result to 10. Source: Schulman 2020,
    EasyR1's bounds. For the KL over the vocabulary see `divergence.chunked_divergence` with kind `reverse_kl`.
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
    return (exponent.expm1() - exponent).clamp(max=LOW_VARIANCE_BOUND)


def adapted_coefficient(
    coefficient: float, observed_kl: float, *, num_sequences: int, kl_target: float, kl_horizon: float
) -> float:
    """Returns the adaptive KL coefficient after a batch of `num_sequences` with mean token KL `observed_kl`.

    `c * (1 + clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon)`, at least 0. Source: Ziegler et al. 2019.
    """
    bounded = min(max(observed_kl / kl_target - 1.0, -ADAPTIVE_ERROR_BOUND), ADAPTIVE_ERROR_BOUND)
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
