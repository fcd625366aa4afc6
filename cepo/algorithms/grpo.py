"""Implements GRPO, in which every token of a response gets the response's group-relative advantage."""

from __future__ import annotations

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.types import TokenBatch, TokenSignal


@register_estimator("grpo")
class Grpo(GroupRelativeEstimator):
    """Gives all tokens of rollout i the advantage `A_i = (R_i - mean_g) / (std_g + 1e-6)`, without a teacher.

    Source: DeepSeekMath (Shao et al. 2024), with EasyR1's unbiased deviation and epsilon.
    """

    Config = GroupConfig
    config: GroupConfig
    reads = ("group_ids",)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        return statistics.outcome_signal(batch, advantages)
