"""Registers two ways of turning beliefs into credit, as a plugin: as a critic, and as the size of a weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pydantic import Field
from torch import Tensor

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.algorithms.evidence import hindsight_advantages
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import HindsightAdvantageConfig, PositiveConfig, TeacherConfig
from cepo.sections.fields import section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal


@register_estimator("belief_critic")
class BeliefCritic(Estimator):
    """`A_t = sum_l lam^l (V_{t+l+1} - V_{t+l}) / sigma` with V_t of `hindsight_advantages`, and R after the last token.

    With lam = 1 it is `(R - V_t) / sigma`. Below 1 it is biased where the teacher's beliefs are not the true values.
    """

    @section
    class Config:
        """GAE's lambda, the advantage, the right answer and the teacher."""

        lam: float = Field(default=0.0, ge=0, le=1)
        advantage: HindsightAdvantageConfig = HindsightAdvantageConfig()
        positive: PositiveConfig = PositiveConfig()
        teacher: TeacherConfig = TeacherConfig()

    config: Config
    views = ("correct",)
    reads = ("group_ids", "old_log_probs")

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns the right answer, never from the rollout itself."""
        return {"correct": positive_references(group, dataclasses.replace(self.config.positive, exclude_self=True))}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        del step
        _, values = hindsight_advantages(batch, dataclasses.replace(self.config.advantage, scale="none"))
        advantages, _ = statistics.generalised_advantages(
            batch.token_level_rewards, values, batch.response_mask, gamma=1.0, gae_lambda=self.config.lam
        )
        prior, size = statistics.pass_rate_of_others(batch.rewards, batch.group_ids)
        advantages = self.shaped(advantages, (batch.rewards.double() - prior).sign().unsqueeze(1))
        if self.config.advantage.scale == "std":
            deviation = (prior * (1 - prior) * size / (size - self.config.advantage.ddof)).sqrt()
            advantages = advantages / deviation.unsqueeze(1)
        return TokenSignal(
            advantages=advantages.to(batch.rewards.dtype) * batch.response_mask,
            metrics=statistics.group_metrics(batch),
        )

    def shaped(self, advantages: Tensor, sign: Tensor) -> Tensor:
        """Returns the critic's advantages as they are; `sign` is (B, 1), that of the rollout's own."""
        del sign
        return advantages


@register_estimator("belief_weight")
class BeliefWeight(BeliefCritic):
    """The critic's advantages where they have the sign of the rollout's own, and 0 elsewhere."""

    def shaped(self, advantages: Tensor, sign: Tensor) -> Tensor:
        return sign * (sign * advantages).relu()
