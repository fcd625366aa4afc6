"""The KL penalty against the initial weights, as part of the reward."""

from __future__ import annotations

from cepo.config.schema import AlgorithmConfig
from cepo.losses.kl import KLController, kl_penalty, penalised_rewards
from cepo.metrics import Metrics, mean_of, mean_value
from cepo.trainer.rollouts import RolloutBatch
from cepo.trainer.state import TrainerState


def penalise(batch: RolloutBatch, algorithm: AlgorithmConfig, state: TrainerState) -> Metrics:
    """Measures the KL of the rollouts; unless it is a term of the loss, takes it from the rewards and moves the coefficient.

    `r_t <- r_t - coefficient * KL_t` with the coefficient before this batch.
    """
    assert batch.reference_log_probs is not None, "the reference has been scored"
    penalties = batch.reference_divergence
    if penalties is None:
        penalties = kl_penalty(batch.old_log_probs, batch.reference_log_probs, algorithm.kl_penalty)
    measured = mean_of(penalties, batch.response_mask)
    metrics: Metrics = {"critic/kl": measured}
    if algorithm.use_kl_loss:
        return metrics
    batch.penalised_rewards = penalised_rewards(
        batch.outcome_rewards(), penalties, batch.response_mask, state.kl_coefficient
    )
    metrics["critic/kl_coef"] = mean_value(state.kl_coefficient)
    controller = KLController(kl_type=algorithm.kl_type, kl_target=algorithm.kl_target, kl_horizon=algorithm.kl_horizon)
    state.kl_coefficient = controller.next_coefficient(
        state.kl_coefficient, measured.result or 0.0, num_sequences=len(batch.generations)
    )
    return metrics
