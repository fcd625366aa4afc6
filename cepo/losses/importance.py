"""Compares the log-probs of the rollout engine with the trainer's: importance weights, and how far they agree."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.base import bounded_ratio
from cepo.metrics import Metrics, max_of, mean_of


def importance_weights(
    old_log_probs: Float[Tensor, "B T"], sampled_log_probs: Float[Tensor, "B T"], *, kind: str, threshold: float
) -> Float[Tensor, "B T"]:
    """Computes each token's weight in the policy loss, which corrects for differing log-probs of engine and trainer.

    `rho = P_trainer(y_t) / P_engine(y_t)` with the weights before the update, C is the threshold. `truncate`:
    min(rho, C) (Yao et al. 2025, verl). `mask`: rho within [1/C, C], else 0 (IcePop, Ling team 2025).
    """
    rho = bounded_ratio(old_log_probs - sampled_log_probs)
    if kind == "truncate":
        return rho.clamp(max=threshold)
    assert kind == "mask", kind
    is_within = (rho >= 1.0 / threshold) & (rho <= threshold)
    return rho.where(is_within, 0.0)


def agreement_metrics(
    sampled: Float[Tensor, "R T"], scored: Float[Tensor, "R T"], counted: Bool[Tensor, "R T"], temperature: float
) -> Metrics:
    """Returns the mean and maximum of |log P_engine - log P_trainer| in nats over the counted tokens, and their KL.

    `rollout/kl` estimates KL(engine || trainer) by the mean of `rho - 1 - log rho`, with rho = P_trainer / P_engine.
    The result is empty unless the temperature is 1, because the engine's log-probs are at temperature 1.
    """
    if temperature != 1.0:
        return {}
    log_ratio = scored - sampled
    gap = log_ratio.abs()
    kl = bounded_ratio(log_ratio) - 1.0 - log_ratio
    return {
        "rollout/log_prob_gap_mean": mean_of(gap, counted),
        "rollout/log_prob_gap_max": max_of(gap, counted),
        "rollout/kl": mean_of(kl, counted),
    }
