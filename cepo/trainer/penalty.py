"""Subtracts a KL penalty from the rewards, and compares the log-probs of engine and trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.data.batch import ScoringRow
from cepo.losses.importance import agreement_metrics
from cepo.losses.kl import adapted_coefficient
from cepo.metrics import Metrics, mean_of, mean_value
from cepo.trainer.checkpoints import TrainerState
from cepo.trainer.protocol import Backend
from cepo.trainer.rollouts import Rollouts

PROMPTS_COMPARED = 8
"""Prompts per step whose first response is scored at temperature 1 too, if the rollout temperature differs."""


def gap_at_temperature_1(rollouts: Rollouts, backend: Backend) -> Metrics:
    """Compares log-probs of engine and trainer at temperature 1, that of the engine's, for runs with another one."""
    first_responses = range(0, len(rollouts.generations), rollouts.group_size)
    rows: list[ScoringRow] = []
    sampled: list[Tensor] = []
    for number in first_responses[:PROMPTS_COMPARED]:
        rows.append(rollouts.scoring_row(number))
        sampled.append(torch.as_tensor(rollouts.generations[number].log_probs))
    scored = backend.score(rows, temperature=1.0)
    # All responses one after the other make one row, (1, tokens), without padding.
    trainers = torch.cat(scored).unsqueeze(0)
    engines = torch.cat(sampled).unsqueeze(0)
    mask = torch.ones_like(engines, dtype=torch.bool)
    return agreement_metrics(engines, trainers, mask, 1.0)


def penalise(
    rewards: Tensor, penalties: Tensor, response_mask: Tensor, algorithm: AlgorithmConfig, state: TrainerState
) -> tuple[Tensor, Metrics]:
    """Subtracts each token's KL from its reward, and returns the rewards and metrics; all tensors are (B, T).

    `r_t <- r_t - coefficient * KL_t`, where `state` holds the coefficient, which is adapted afterwards to the mean over
    responses of their mean over tokens, as in EasyR1. If the KL is a term of the loss, the rewards are unchanged.
    """
    totals = penalties.double().where(response_mask, 0.0).sum(dim=1)
    measured = mean_of(totals / response_mask.sum(dim=1).clamp(min=1))
    metrics: Metrics = {"critic/kl": measured}
    if algorithm.use_kl_loss:
        return rewards, metrics
    coefficient = state.kl_coefficient
    metrics["critic/kl_coef"] = mean_value(coefficient)
    if algorithm.kl_type == "adaptive":
        state.kl_coefficient = adapted_coefficient(
            coefficient,
            measured.result or 0.0,
            num_sequences=len(rewards),
            kl_target=algorithm.kl_target,
            kl_horizon=algorithm.kl_horizon,
        )
    return rewards - coefficient * penalties.where(response_mask, 0.0), metrics
