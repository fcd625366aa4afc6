"""Implements ReMax, which compares each rollout with the greedy response to the same prompt."""

from __future__ import annotations

from cepo.algorithms import credit
from cepo.algorithms.base import Estimator, register_estimator
from cepo.metrics import mean_of
from cepo.types import TokenBatch, TokenSignal


@register_estimator("remax")
class ReMax(Estimator):
    """Gives all tokens of rollout i the advantage `A_i = R_i - R_greedy`, without a teacher.

    It samples an additional greedy response per prompt; one rollout per prompt is enough. Source: Li et al. 2024.
    """

    needs_baseline = True
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Returns the reward minus the greedy one on every response token, 0 on padding."""
        del step
        assert batch.reward_baselines is not None, "needs_baseline: the batch must bring the greedy responses' rewards"
        rewards = batch.rewards
        return TokenSignal(
            advantages=credit.over_response(rewards - batch.reward_baselines, batch.response_mask),
            metrics={
                **credit.group_metrics(rewards, batch.correct, batch.group_ids),
                "baseline/greedy_reward": mean_of(batch.reward_baselines),
            },
        )
