"""GRPO for pass@k: only a group's best rollout learns, by its margin over the second best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms.base import Estimator, register_estimator
from cepo.algorithms.settings import GroupAdvantageConfig
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@register_estimator("grpo_passk")
class GrpoPassK(Estimator):
    """`A = (R_1 - R_2) / (std_g + 1e-6)` for all tokens of the group's best rollout, 0 for the others. No teacher.

    Source: Tang et al. 2025 (arXiv 2503.19595). A group whose best reward two rollouts share has A = 0 throughout.
    """

    Config = GroupAdvantageConfig
    config: GroupAdvantageConfig
    needs_group = True
    reads_old_log_probs = False

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """The best rollouts of groups with a single best one."""
        return self._advantages(rewards, group_ids) != 0

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """The margin on every response token of the best rollouts, 0 elsewhere."""
        from cepo.algorithms import credit

        del step
        rewards = batch.rewards
        return TokenSignal(
            advantages=credit.over_response(self._advantages(rewards, batch.group_ids), batch.response_mask),
            metrics=credit.group_metrics(rewards, batch.correct, batch.group_ids),
        )

    def _advantages(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
        from cepo.algorithms import credit  # needs torch, which reading a config must not load

        return credit.best_of_group_advantages(rewards, group_ids, ddof=self.config.ddof, scale=self.config.scale)
