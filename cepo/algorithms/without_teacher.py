"""Implements the methods without a teacher, which read rewards alone or in addition a critic's values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, GroupRelativeEstimator, credit, register_estimator
from cepo.algorithms.settings import GroupConfig
from cepo.metrics import mean_of
from cepo.sections import Share, section
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@register_estimator("grpo")
class Grpo(GroupRelativeEstimator):
    """Gives all tokens of rollout i the advantage `A_i = (R_i - mean_g) / (std_g + 1e-6)`.

    Source: DeepSeekMath (Shao et al. 2024), with EasyR1's unbiased deviation and epsilon.
    """

    Config = GroupConfig
    config: GroupConfig
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        advantages = credit.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        return credit.outcome_signal(batch, advantages)


@register_estimator("rloo")
class Rloo(GroupRelativeEstimator):
    """Gives all tokens of rollout i `A_i = R_i - mean of the other rewards of the group`.

    Source: Ahmadian et al. 2024. It is `n / (n - 1)` times GRPO's advantage without the division by the deviation.
    """

    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        rewards = batch.rewards
        centred, _, size = credit.group_moments(rewards, batch.group_ids)
        advantages = (centred * size / (size - 1)).where(credit.live_rows(rewards, batch.group_ids), 0.0)
        return credit.outcome_signal(batch, advantages.to(rewards.dtype))


@register_estimator("grpo_passk")
class GrpoPassK(Estimator):
    """Gives all tokens of a group's best rollout `A = (R_1 - R_2) / (std_g + 1e-6)`, others 0.

    R_1 and R_2 are the group's two highest rewards. If two rollouts share the highest reward, A = 0 in the whole group.
    Source: Tang et al. 2025 (arXiv 2503.19595).
    """

    Config = GroupConfig
    config: GroupConfig
    needs_group = True
    reads_old_log_probs = False

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns True for the best rollouts of groups that have a single best one."""
        return self._advantages(rewards, group_ids) != 0

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        return credit.outcome_signal(batch, self._advantages(batch.rewards, batch.group_ids))

    def _advantages(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
        group, num_groups = credit.groups_of(group_ids)
        _, deviation, _ = credit.group_moments(rewards, group_ids, ddof=self.config.advantage.ddof)
        exact = rewards.double()
        lowest = exact.new_full((num_groups,), -math.inf)
        best = exact == lowest.scatter_reduce(0, group, exact, "amax")[group]
        second = lowest.scatter_reduce(0, group, exact.masked_fill(best, -math.inf), "amax")[group]
        alone = group[best].bincount(minlength=num_groups)[group] == 1
        margin = exact - second
        if self.config.advantage.scale == "std":
            margin = margin / (deviation + credit.DEVIATION_FLOOR)
        return margin.where(best & alone & credit.live_rows(rewards, group_ids), 0.0).to(rewards.dtype)


@register_estimator("remax")
class ReMax(Estimator):
    """Gives all tokens of rollout i the advantage `A_i = R_i - R_greedy`.

    It samples an additional greedy response per prompt; one rollout per prompt is enough. Source: Li et al. 2024.
    """

    needs_baseline = True
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        assert batch.reward_baselines is not None, "needs_baseline: the batch must bring the greedy responses' rewards"
        signal = credit.outcome_signal(batch, batch.rewards - batch.reward_baselines)
        signal.metrics["baseline/greedy_reward"] = mean_of(batch.reward_baselines)
        return signal


@register_estimator("reinforce_plus_plus")
class ReinforcePlusPlus(Estimator):
    """Computes `A_t = (G_t - mean) / sqrt(var + 1e-8)` with `G_t = r_t + gamma G_{t+1}`, over all response tokens.

    One rollout per prompt is enough. Batches of equal returns have A = 0. Source: Hu 2025.
    """

    @section
    class Config:
        gamma: Share = 1.0

    config: Config
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask
        returns = credit.discounted_returns(batch.token_level_rewards, mask, gamma=self.config.gamma)
        return TokenSignal(
            advantages=credit.whitened(returns, mask).to(batch.token_level_rewards.dtype),
            metrics=credit.group_metrics(batch.rewards, batch.correct, batch.group_ids),
        )


@register_estimator("gae")
class Gae(Estimator):
    """Whitens `A_t = sum_l (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})`; the critic learns `A_t + V_t`.

    Equal advantages become 0. Source: Schulman et al. 2016, with PPO's whitening.
    """

    @section
    class Config:
        gamma: Share = 1.0
        lam: Share = 1.0

    config: Config
    needs_values = True
    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        assert batch.values is not None, "needs_values: the batch must bring the critic's values"
        mask, dtype = batch.response_mask, batch.token_level_rewards.dtype
        advantages, returns = credit.generalised_advantages(
            batch.token_level_rewards, batch.values, mask, gamma=self.config.gamma, gae_lambda=self.config.lam
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
