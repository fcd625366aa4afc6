"""RLOO: each rollout is compared with the mean of the others."""

from __future__ import annotations

from cepo.algorithms.base import GroupRelativeEstimator, register_estimator
from cepo.types import TokenBatch, TokenSignal


@register_estimator("rloo")
class Rloo(GroupRelativeEstimator):
    """`A_i = R_i - mean of the other rewards of the group` for all tokens of rollout i. No teacher.

    Source: Ahmadian et al. 2024. It is `n / (n - 1)` times GRPO's advantage without the division by the deviation.
    """

    reads_old_log_probs = False

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """The leave-one-out advantage on every response token, 0 on padding."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load

        del step
        rewards = batch.rewards
        advantages = credit.leave_one_out_advantages(rewards, batch.group_ids)
        return TokenSignal(
            advantages=credit.over_response(advantages, batch.response_mask),
            metrics=credit.group_metrics(rewards, batch.correct, batch.group_ids),
        )
