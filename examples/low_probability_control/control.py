"""Defines a control in one file: rare tokens are pushed down, whatever the reward and whoever would teach."""

from typing import Annotated

from pydantic import Field

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.types import TokenBatch, TokenSignal, mean_of


@register_estimator("low_probability_control")
class LowProbabilityControl(Estimator):
    """`A_t = -a` at the share q of each response's tokens that the policy found least probable, 0 at all others.

    It reads no reward and has no teacher: a method that is to learn from evidence must do better. Degenerate case: a = 0
    learns nothing. Source: the control of OPSA (arXiv 2608.31046), which found it to match on-policy distillation.
    """

    class Config:
        size: float = Field(default=0.5, ge=0, description="Size a of the negative advantage.")
        share: Annotated[float, Field(gt=0, le=1, description="Share q of each response's tokens.")] = 0.2

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        is_rare = statistics.highest_tokens(
            -batch.old_log_probs, batch.response_mask, share=self.config.share
        )  # (B, T)
        metrics = statistics.group_metrics(batch)
        metrics["control/log_prob_of_rare_tokens"] = mean_of(batch.old_log_probs, is_rare)
        advantages = -self.config.size * is_rare.to(batch.old_log_probs.dtype)
        return TokenSignal(advantages=advantages, metrics=metrics)
