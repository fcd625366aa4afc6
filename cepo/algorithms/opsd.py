"""Implements OPSD, in which the student's whole next-token distribution follows a teacher with the right answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, register_estimator, statistics
from cepo.algorithms.base import BatchField
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import DistillationConfig, GroupConfig, PositiveConfig, TeacherConfig
from cepo.metrics import fraction, mean_of
from cepo.sections.fields import section
from cepo.types import Distillation, Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


@register_estimator("opsd")
class Opsd(Estimator):
    """Lets the student follow the teacher over the whole vocabulary, on the student's own responses.

        loss_t = weight D(P_correct, P_student)_t

    D is `divergence`, by default `KL(P_correct || P_student)`, and does not depend on the reward. `policy_weight A`,
    with the group advantage A, goes into an additional policy loss. Degenerate cases: rollouts without a reference are
    masked (zero loss, attached zero gradient); `weight = 0` with `policy_weight = 1` is exactly GRPO, without a teacher.
    Source: OPSD (Zhao et al. 2026), with settings of the CEPO paper's comparison: live teacher, ground-truth answer.
    """

    @section
    class Config(GroupConfig):
        distillation: DistillationConfig = DistillationConfig()
        positive: PositiveConfig = PositiveConfig()
        teacher: TeacherConfig = TeacherConfig()

    config: Config
    views = ("correct",)
    distilled_view = "correct"

    @property
    def reads(self) -> tuple[BatchField, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        compares_rollouts = self.config.distillation.policy_weight > 0
        shows_peers = self.config.positive.source.startswith("peer_")
        return ("group_ids", "old_log_probs") if compares_rollouts or shows_peers else ("old_log_probs",)

    @property
    def reads_teacher_entropies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.config.distillation.divergence.entropy_beta > 0

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"correct": positive_references(group, self.config.positive)}

    def needs_teacher(self, *, step: int) -> bool:
        return self.config.distillation.weight > 0

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns the rows with a reference, and with an additional policy loss those of groups whose rewards differ."""
        live = has_reference["correct"]
        if self.config.distillation.policy_weight > 0:
            live = live | statistics.live_rows(rewards, group_ids)
        return live

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Returns the weight of each token's divergence; the teacher's log-probs serve only metrics and diagnostics."""
        config = self.config.distillation
        advantages = self.policy_advantages(batch)
        metrics = statistics.group_metrics(batch)
        if not self.needs_teacher(step=step):
            return TokenSignal(advantages=advantages, metrics=metrics)
        is_taught = batch.has_reference["correct"]  # (B,)
        weight = config.weight * is_taught.to(batch.rewards.dtype)
        token_weight = statistics.over_response(weight, batch.response_mask)  # (B, T)
        diagnostics: dict[str, Tensor] = {}
        if "correct" in batch.teacher_log_probs:
            learns = token_weight > 0
            is_right = batch.correct.unsqueeze(1)
            evidence = batch.teacher_log_probs["correct"] - batch.old_log_probs
            delta = evidence.detach().where(learns, 0.0)
            diagnostics["delta"] = delta
            metrics["distillation/delta_mean_right"] = mean_of(delta, learns & is_right)
            metrics["distillation/delta_mean_wrong"] = mean_of(delta, learns & ~is_right)
        group, num_groups = statistics.groups_of(batch.group_ids)
        num_taught = group[is_taught].bincount(minlength=num_groups)  # (groups,)
        num_taught_groups = int((num_taught > 0).sum())
        metrics["distillation/demonstrated_rollouts"] = mean_of(is_taught.float())
        metrics["distillation/demonstrated_groups"] = fraction(num_taught_groups, num_groups)
        return TokenSignal(
            advantages=advantages,
            metrics=metrics,
            diagnostics=diagnostics,
            distillation=Distillation(view="correct", divergence=config.divergence, token_weight=token_weight),
        )

    def policy_advantages(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Returns `policy_weight A` of the additional policy loss, 0 without one."""
        policy_weight = self.config.distillation.policy_weight
        if policy_weight == 0:
            return batch.rewards.new_zeros(batch.response_mask.shape)
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        return statistics.over_response(policy_weight * advantages, batch.response_mask)
