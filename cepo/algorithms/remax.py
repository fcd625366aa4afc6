"""Implements ReMax, which compares each rollout with the greedy response to the same prompt."""

from __future__ import annotations

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.metrics import mean_of
from cepo.types import TokenBatch, TokenSignal


@register_estimator("remax")
class ReMax(Estimator):
    """Gives all tokens of rollout i the advantage `A_i = R_i - R_greedy`, without a teacher.

    It samples an additional greedy response per prompt; one rollout per prompt is enough. Source: Li et al. 2024.
    """

    reads = ("reward_baselines",)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        assert batch.reward_baselines is not None, (
            "reads reward_baselines: the batch must bring the greedy responses' rewards"
        )
        signal = statistics.outcome_signal(batch, batch.rewards - batch.reward_baselines)
        signal.metrics["baseline/greedy_reward"] = mean_of(batch.reward_baselines)
        return signal
