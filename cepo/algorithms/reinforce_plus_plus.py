"""Implements REINFORCE++, whose advantages are discounted rewards-to-go, whitened over the whole batch."""

from __future__ import annotations

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.sections.fields import Share, section
from cepo.types import TokenBatch, TokenSignal


@register_estimator("reinforce_plus_plus")
class ReinforcePlusPlus(Estimator):
    """Computes `A_t = (G_t - mean) / sqrt(var + 1e-8)` with `G_t = r_t + gamma G_{t+1}`, over all response tokens.

    It has no teacher or groups: one rollout per prompt is enough. Batches of equal returns have A = 0. Source: Hu 2025.
    """

    @section
    class Config:
        gamma: Share = 1.0

    config: Config
    reads = ()

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask
        rewards = batch.token_level_rewards
        returns = statistics.discounted_sums(rewards.double().where(mask, 0.0), factor=self.config.gamma)  # G_t
        return TokenSignal(
            advantages=statistics.whitened(returns, mask).to(rewards.dtype),
            metrics=statistics.group_metrics(batch),
        )
