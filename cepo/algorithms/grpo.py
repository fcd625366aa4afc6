"""GRPO: every token of a response gets the response's group-relative advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms.base import Estimator, register_estimator
from cepo.algorithms.settings import GroupAdvantageConfig
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@register_estimator("grpo")
class Grpo(Estimator):
    """`A_i = (R_i - mean_g) / (std_g + 1e-6)` for all tokens of rollout i. No teacher.

    Source: DeepSeekMath (Shao et al. 2024).
    """

    Config = GroupAdvantageConfig
    config: GroupAdvantageConfig
    needs_group = True

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Rollouts of groups whose rewards differ; all others have A = 0."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load

        return credit.live_rows(rewards, group_ids)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """The group advantage on every response token, 0 on padding."""
        from cepo.algorithms import credit

        del step
        rewards = batch.rewards
        advantages = credit.group_advantages(rewards, batch.group_ids, ddof=self.config.ddof, scale=self.config.scale)
        return TokenSignal(
            advantages=credit.over_response(advantages, batch.response_mask),
            metrics=credit.group_metrics(rewards, batch.correct, batch.group_ids),
        )
