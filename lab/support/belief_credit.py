"""Registers two ways of turning beliefs into credit, as a plugin: as a critic, and as the size of a weight."""

from __future__ import annotations

import dataclasses

from pydantic import Field

from cepo.algorithms import credit, register_estimator
from cepo.algorithms.evidence import hindsight_advantages
from cepo.algorithms.hindsight import Hindsight
from cepo.algorithms.settings import HindsightAdvantageConfig, PositiveConfig, TeacherConfig
from cepo.sections import section
from cepo.types import TokenBatch, TokenSignal


@section
class BeliefConfig:
    """Hindsight's settings and GAE's lambda."""

    lam: float = Field(default=0.0, ge=0, le=1)
    advantage: HindsightAdvantageConfig = HindsightAdvantageConfig()
    positive: PositiveConfig = PositiveConfig()
    teacher: TeacherConfig = TeacherConfig()


@register_estimator("belief_critic")
class BeliefCritic(Hindsight):
    """`A_t = sum_l lam^l (V_{t+l+1} - V_{t+l}) / sigma` with hindsight's V_t, and R after the last token.

    With lam = 1 it is hindsight. Below 1 it is biased where the teacher's beliefs are not the true values.
    """

    Config = BeliefConfig
    config: BeliefConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        plain = dataclasses.replace(self.config.advantage, scale="none")
        hindsight = super().signal(batch, step=step)
        _, values = hindsight_advantages(batch, plain)
        advantages, _ = credit.generalised_advantages(
            batch.token_level_rewards, values, batch.response_mask, gamma=1.0, gae_lambda=self.config.lam
        )
        advantages = self._shaped(advantages, batch)
        if self.config.advantage.scale == "std":
            prior, size = credit.pass_rate_of_others(batch.rewards, batch.group_ids)
            deviation = (prior * (1 - prior) * size / (size - self.config.advantage.ddof)).sqrt()
            advantages = advantages / deviation.unsqueeze(1)
        return dataclasses.replace(hindsight, advantages=advantages.to(batch.rewards.dtype) * batch.response_mask)

    def _shaped(self, advantages, batch: TokenBatch):
        return advantages


@register_estimator("belief_weight")
class BeliefWeight(BeliefCritic):
    """`A_hat_t = relu(sign(A) A_t) sign(A)`: the critic's credit where it has the sign of the rollout's advantage A."""

    def _shaped(self, advantages, batch: TokenBatch):
        prior, _ = credit.pass_rate_of_others(batch.rewards, batch.group_ids)
        sign = (batch.rewards.double() - prior).sign().unsqueeze(1)
        return sign * (sign * advantages).relu()
