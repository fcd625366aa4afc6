"""Computes the objective of an optimizer batch: the policy loss, KL and divergence of each token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses import PolicyLoss, PolicyTokens, build_loss
from cepo.losses.aggregation import LossDenominators
from cepo.losses.divergence import distillation_losses
from cepo.losses.importance import importance_weights
from cepo.losses.kl import kl_penalty
from cepo.losses.settings import DEFAULT_LOSS
from cepo.metrics import Metrics, mean_of, observations, share_of_mean
from cepo.types import DivergenceConfig


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The policy loss, and the settings of what every loss shares, named as in `worker.actor` and `algorithm`.

    `entropy_coefficient` is the weight of each token's entropy, which the loss subtracts.
    `rollout_is` (none, truncate or mask) with its threshold (> 1) corrects for the gap between engine and trainer.
    `kl_coefficient` is 0 if the KL is off or part of the reward.
    """

    loss: PolicyLoss = field(default_factory=lambda: build_loss(DEFAULT_LOSS))
    entropy_coefficient: float = 0.0
    rollout_is: str = "none"
    rollout_is_threshold: float = 2.0
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
    entropies: Float[Tensor, "R T"] | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Computes the loss with metrics, for a token the sum of its terms:

        weight_t (policy_loss_t + kl_coefficient KL_t + divergence_weight_t divergence_t - entropy_coefficient H_t)

    Losses and clip fractions in the metrics are shares of the optimizer step's, to be merged with `step_metrics`.

    Args:
        log_probs: of the sampled tokens, with gradient.
        teacher_divergence: between student and teacher, with gradient; None without distillation.
        entropies: H in nats, with gradient; None without an entropy in the loss.
    """
    mask = terms.response_mask
    weight = terms.weight
    policy_losses, metrics = _policy_losses(log_probs, terms, settings)
    policy = (policy_losses * weight).sum()
    metrics["actor/pg_loss"] = share_of_mean(policy)
    total = policy
    if terms.reference_log_probs is not None and settings.kl_coefficient > 0:
        penalties = kl_penalty(log_probs, terms.reference_log_probs, settings.kl_penalty)
        metrics["actor/kl_loss"] = mean_of(penalties.detach(), mask)
        total = total + settings.kl_coefficient * (penalties * weight).sum()
    if teacher_divergence is not None:
        assert terms.divergence_weight is not None and divergence_settings is not None, "a divergence has a weight"
        distillation_terms, distillation_metrics = distillation_losses(
            teacher_divergence, log_probs, terms.old_log_probs, terms.divergence_weight, divergence_settings
        )
        distillation = (distillation_terms * weight).sum()
        metrics |= distillation_metrics
        metrics["actor/distillation_loss"] = share_of_mean(distillation)
        total = total + distillation
    if entropies is not None:
        entropy_loss = -settings.entropy_coefficient * (entropies * weight).sum()
        metrics["actor/entropy"] = mean_of(entropies.detach(), mask)
        metrics["actor/entropy_loss"] = share_of_mean(entropy_loss)
        total = total + entropy_loss
    return total, metrics


def _policy_losses(
    log_probs: Float[Tensor, "R T"], terms: ObjectiveTerms, settings: ObjectiveSettings
) -> tuple[Float[Tensor, "R T"], Metrics]:
    """Returns each token's policy loss, with its importance weight if there is one, and metrics."""
    tokens = PolicyTokens(
        log_probs=log_probs,
        old_log_probs=terms.old_log_probs,
        advantages=terms.advantages,
        response_mask=terms.response_mask,
    )
    losses = settings.loss.checked_token_losses(tokens)
    metrics = policy_metrics(settings.loss, tokens.detached())
    if settings.rollout_is == "none":
        return losses, metrics
    assert terms.sampled_log_probs is not None, "importance weights compare with the rollout engine"
    importance = importance_weights(
        terms.old_log_probs,
        terms.sampled_log_probs,
        kind=settings.rollout_is,
        threshold=settings.rollout_is_threshold,
    )
    metrics["rollout/is_weight"] = mean_of(importance, terms.response_mask)
    return losses * importance, metrics


@torch.no_grad()
def policy_metrics(loss: PolicyLoss, tokens: PolicyTokens) -> Metrics:
    """Returns the k1 estimate of KL(old || new) in nats, mean -log P as a proxy of the entropy, and the loss's metrics.

    The first two are means over these tokens. The counts of the loss's `fractions` become fractions by `step_metrics`.
    """
    mask = tokens.response_mask
    metrics: Metrics = {
        "actor/live_ppo_kl": mean_of(tokens.old_log_probs - tokens.log_probs, mask),
        "actor/live_entropy": mean_of(-tokens.log_probs, mask),
    }
    for name, chosen in loss.checked_counts(tokens).items():
        num_chosen = (chosen & mask).sum()
        metrics[name] = share_of_mean(num_chosen)
    return metrics | loss.checked_metrics(tokens)


def step_metrics(settings: ObjectiveSettings, denominators: LossDenominators, *, distils: bool) -> Metrics:
    """Returns the denominators for the shares of an optimizer step's micro-batches and ranks, once per step.

    Losses become means over optimizer steps, clip fractions shares of all response tokens; rows without gradient add 0.
    """
    metrics: Metrics = {"actor/pg_loss": observations()}
    if distils:
        metrics["actor/distillation_loss"] = observations()
    if settings.entropy_coefficient != 0:
        metrics["actor/entropy_loss"] = observations()
    for name in settings.loss.fractions:
        metrics[name] = observations(denominators.num_tokens)
    return metrics
