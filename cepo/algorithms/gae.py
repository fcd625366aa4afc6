"""Implements GAE, whose advantages come from a critic's values and are whitened over the whole batch."""

from __future__ import annotations

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.metrics import mean_of
from cepo.sections.fields import Share, section
from cepo.types import TokenBatch, TokenSignal


@register_estimator("gae")
class Gae(Estimator):
    """Computes advantages from the values V of a critic, which learns `A_t + V_t` before A is whitened over the batch.

        A_t = sum_l (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})

    It has no teacher. Equal advantages become 0. Source: Schulman et al. 2016, with PPO's whitening.
    """

    @section
    class Config:
        gamma: Share = 1.0
        lam: Share = 1.0

    config: Config
    reads = ("values",)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        assert batch.values is not None, "reads values: the batch must bring the critic's values"
        mask = batch.response_mask
        dtype = batch.token_level_rewards.dtype
        advantages, returns = statistics.generalised_advantages(
            batch.token_level_rewards, batch.values, mask, gamma=self.config.gamma, gae_lambda=self.config.lam
        )
        return TokenSignal(
            advantages=statistics.whitened(advantages, mask).to(dtype),
            returns=returns.to(dtype),
            metrics={
                **statistics.group_metrics(batch),
                "critic/values": mean_of(batch.values, mask),
                "critic/returns": mean_of(returns, mask),
                "critic/squared_error": mean_of((returns - batch.values).square(), mask),
            },
        )
