"""Implements GRPO for pass@k, in which only a group's best rollout learns, by its margin over the second best."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


@register_estimator("grpo_passk")
class GrpoPassK(Estimator):
    """Gives all tokens of a group's best rollout `A = (R_1 - R_2) / (std_g + 1e-6)`, others 0, without a teacher.

    R_1 and R_2 are the group's two highest rewards. If two rollouts share the highest reward, A = 0 in the whole group.
    Source: Tang et al. 2025 (arXiv 2503.19595).
    """

    Config = GroupConfig
    config: GroupConfig
    reads = ("group_ids",)

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns True for the best rollouts of groups that have a single best one."""
        return self._advantages(rewards, group_ids) != 0

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        return statistics.outcome_signal(batch, self._advantages(batch.rewards, batch.group_ids))

    def _advantages(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
        settings = self.config.advantage
        exact = rewards.double()
        group, num_groups = statistics.groups_of(group_ids)
        highest = statistics.group_maxima(exact, group)  # (groups,) R_1
        is_best = exact == highest[group]  # (B,)
        num_best = group[is_best].bincount(minlength=num_groups)  # (groups,)
        without_best = exact.masked_fill(is_best, -math.inf)
        highest_of_others = statistics.group_maxima(without_best, group)  # R_2

        centred, deviation, _ = statistics.group_moments(rewards, group_ids, ddof=settings.ddof)
        mean = exact - centred
        margin = exact - highest_of_others[group]
        advantages = statistics.scaled(margin, deviation, mean, settings)
        is_best_alone = is_best & (num_best == 1)[group]
        learns = is_best_alone & statistics.live_rows(rewards, group_ids)
        return advantages.where(learns, 0.0).to(rewards.dtype)
