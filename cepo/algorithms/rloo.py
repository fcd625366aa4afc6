"""Implements RLOO, which compares each rollout with the mean of the others."""

from __future__ import annotations

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.types import TokenBatch, TokenSignal


@register_estimator("rloo")
class Rloo(GroupRelativeEstimator):
    """Gives all tokens of rollout i `A_i = R_i - mean of the other rewards of the group`, without a teacher.

    Source: Ahmadian et al. 2024. It is `n / (n - 1)` times GRPO's advantage without the division by the deviation.
    """

    reads = ("group_ids",)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        rewards = batch.rewards
        centred, _, size = statistics.group_moments(rewards, batch.group_ids)  # R_i - mean_g
        advantages = centred * size / (size - 1)
        advantages = advantages.where(statistics.live_rows(rewards, batch.group_ids), 0.0)
        return statistics.outcome_signal(batch, advantages.to(rewards.dtype))
