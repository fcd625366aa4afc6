"""Implements GRPO, in which every token of a response gets the response's group-relative advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms import credit
from cepo.algorithms.base import GroupRelativeEstimator, register_estimator
from cepo.algorithms.settings import GroupAdvantageConfig, GroupConfig
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor

_DEFAULTS = GroupAdvantageConfig()


def group_advantages(
    rewards: Float[Tensor, " B"],
    group_ids: Int64[Tensor, " B"],
    settings: GroupAdvantageConfig = _DEFAULTS,
) -> Float[Tensor, " B"]:
    """Computes `A_i = (R_i - mean_g) / (std_g + 1e-6)`, exactly 0 in groups of equal rewards; statistics in float64.

    `scale: none` omits the division (Dr. GRPO). Raises `ConfigError`: a group has a single rollout.
    """
    advantages, deviation, _ = credit.group_moments(rewards, group_ids, ddof=settings.ddof)  # R_i - mean_g
    if settings.scale == "std":
        advantages = advantages / (deviation + credit.DEVIATION_FLOOR)
    return advantages.where(credit.live_rows(rewards, group_ids), 0.0).to(rewards.dtype)


@register_estimator("grpo")
class Grpo(GroupRelativeEstimator):
    """Gives all tokens of rollout i the advantage `A_i = (R_i - mean_g) / (std_g + 1e-6)`, without a teacher.

    Source: DeepSeekMath (Shao et al. 2024), with EasyR1's unbiased deviation and epsilon.
    """

    Config = GroupConfig
    config: GroupConfig
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        return credit.outcome_signal(batch, group_advantages(batch.rewards, batch.group_ids, self.config.advantage))
