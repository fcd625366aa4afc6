"""GAE: advantages from a critic's values, whitened over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from cepo.algorithms.base import Estimator, register_estimator
from cepo.errors import require
from cepo.types import TokenBatch, TokenSignal


@register_estimator("gae")
class Gae(Estimator):
    """`A_t = sum_l (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})`, whitened; the critic learns `A_t + V_t`.

    Source: Schulman et al. 2016, with PPO's whitening. No teacher; a critic of its own. Equal advantages whiten to 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`gamma` discounts later rewards, `gae_lambda` trades the critic's bias against the returns' variance."""

        gamma: float = 1.0
        gae_lambda: float = 1.0

        def __post_init__(self) -> None:
            require(0 <= self.gamma <= 1, "gamma", self.gamma, "0 <= gamma <= 1")
            require(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "0 <= gae_lambda <= 1")

    config: Config
    needs_values = True
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Whitened advantages for the policy, plain returns for the critic; both 0 on padding."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load
        from cepo.metrics import mean_of

        del step
        assert batch.values is not None, "needs_values: the batch must bring the critic's values"
        mask, dtype = batch.response_mask, batch.token_level_rewards.dtype
        advantages, returns = credit.generalised_advantages(
            batch.token_level_rewards, batch.values, mask, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda
        )
        return TokenSignal(
            advantages=credit.whitened(advantages, mask).to(dtype),
            returns=returns.to(dtype),
            metrics={
                **credit.group_metrics(batch.rewards, batch.correct, batch.group_ids),
                "critic/values": mean_of(batch.values, mask),
                "critic/returns": mean_of(returns, mask),
                "critic/squared_error": mean_of((returns - batch.values).square(), mask),
            },
        )
