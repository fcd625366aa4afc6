"""Implements OPSD, in which the student's whole next-token distribution follows a teacher with the right answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, credit, register_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import DistillationConfig, GroupConfig, PositiveConfig, TeacherConfig
from cepo.metrics import fraction, mean_of
from cepo.sections.declaring import section
from cepo.types import Distillation, Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@register_estimator("opsd")
class Opsd(Estimator):
    """Distils with `loss_t = weight D(P_correct, P_student)_t` over the vocabulary, on the student's own responses.

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

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.needs_group = self.config.distillation.policy_weight > 0 or self.config.positive.source.startswith("peer_")

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        return {"correct": positive_references(group, self.config.positive)}

    def needs_teacher(self, *, step: int) -> bool:
        return self.config.distillation.weight > 0

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns True for all rows, as any may get a reference; without distillation, where group rewards differ."""
        is_distilled = self.config.distillation.weight > 0
        return credit.all_rows(rewards) if is_distilled else credit.live_rows(rewards, group_ids)

    def learning_rows(
        self, live: Bool[Tensor, " B"], has_reference: Mapping[str, Bool[Tensor, " B"]]
    ) -> Bool[Tensor, " B"]:
        """Returns the live rows with a reference, or with an additional policy loss all live rows."""
        return live if self.config.distillation.policy_weight > 0 else live & has_reference["correct"]

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Returns the weight of each token's divergence; the teacher's log-probs serve only metrics and diagnostics."""
        config, mask, rewards = self.config.distillation, batch.response_mask, batch.rewards
        advantages = rewards.new_zeros(mask.shape)
        if config.policy_weight > 0:
            of_rows = config.policy_weight * credit.group_advantages(rewards, batch.group_ids, self.config.advantage)
            advantages = credit.over_response(of_rows, mask)
        metrics = credit.group_metrics(rewards, batch.correct, batch.group_ids)
        if not self.needs_teacher(step=step):
            return TokenSignal(advantages=advantages, metrics=metrics)
        shown, right = batch.has_reference["correct"], batch.correct.unsqueeze(1)
        token_weight = credit.over_response(config.weight * shown.to(rewards.dtype), mask)
        diagnostics: dict[str, Tensor] = {}
        if "correct" in batch.teacher_log_probs:
            learning = token_weight > 0
            delta = (batch.teacher_log_probs["correct"] - batch.old_log_probs).detach().where(learning, 0.0)
            diagnostics["delta"] = delta
            metrics["distillation/delta_mean_right"] = mean_of(delta, learning & right)
            metrics["distillation/delta_mean_wrong"] = mean_of(delta, learning & ~right)
        group, num_groups = credit.groups_of(batch.group_ids)
        metrics["distillation/demonstrated_rollouts"] = mean_of(shown.float())
        taught = int((group[shown].bincount(minlength=num_groups) > 0).sum())
        metrics["distillation/demonstrated_groups"] = fraction(taught, num_groups)
        return TokenSignal(
            advantages=advantages,
            metrics=metrics,
            diagnostics=diagnostics,
            distillation=Distillation(view="correct", divergence=config.divergence, token_weight=token_weight),
        )
