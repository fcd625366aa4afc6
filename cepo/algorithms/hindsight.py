"""Implements hindsight: a baseline that follows what a teacher with the right answer makes of the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cepo.algorithms import Estimator, credit, register_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import HindsightAdvantageConfig, PositiveConfig, TeacherConfig
from cepo.sections.declaring import section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal


@register_estimator("hindsight")
class Hindsight(Estimator):
    """Computes `A_t = (R - V_t) / sigma` of `credit.hindsight_advantages`, with `V_t = sigmoid(logit p + sum_{s<t} delta_s)`.

    V_t reads nothing after the prefix, so the gradient is that of the expected reward, times the mean of 1 / sigma.
    Degenerate cases: V_t is p without a reference or with equal teachers. Source: docs/hindsight.md; the ratio is from
    RLSD (Yang et al. 2026), the unbiasedness from Williams 1992.
    """

    @section
    class Config:
        advantage: HindsightAdvantageConfig = HindsightAdvantageConfig()
        positive: PositiveConfig = PositiveConfig()
        teacher: TeacherConfig = TeacherConfig()

    config: Config
    views = ("correct",)
    needs_group = True

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns the right answer, never from the rollout itself: its baseline must not know how the response ends."""
        return {"correct": positive_references(group, replace(self.config.positive, exclude_self=True))}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        advantages, values = credit.hindsight_advantages(batch, self.config.advantage)
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        return TokenSignal(
            advantages=advantages,
            metrics=metrics | credit.value_metrics(values, batch),
            diagnostics={"delta": credit.one_sided_delta(batch), "value": values},
        )
