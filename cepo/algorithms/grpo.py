"""GRPO: every token of a response gets the response's group-relative advantage."""

from __future__ import annotations

from cepo.algorithms.base import GroupRelativeEstimator, register_estimator
from cepo.algorithms.settings import GroupAdvantageConfig
from cepo.types import TokenBatch, TokenSignal


@register_estimator("grpo")
class Grpo(GroupRelativeEstimator):
    """`A_i = (R_i - mean_g) / (std_g + 1e-6)` for all tokens of rollout i. No teacher.

    Source: DeepSeekMath (Shao et al. 2024).
    """

    Config = GroupAdvantageConfig
    config: GroupAdvantageConfig

    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """The group advantage on every response token, 0 on padding."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load

        del step
        rewards = batch.rewards
        advantages = credit.group_advantages(rewards, batch.group_ids, ddof=self.config.ddof, scale=self.config.scale)
        return TokenSignal(
            advantages=credit.over_response(advantages, batch.response_mask),
            metrics=credit.group_metrics(rewards, batch.correct, batch.group_ids),
        )
