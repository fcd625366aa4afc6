"""Defines a method in one file: the more a wrong response's answer explains a token, the more blame the token gets."""

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, TeacherConfig, group_advantages, register_estimator, statistics
from cepo.types import Reference, RolloutGroup, TextReference, TokenBatch, TokenSignal, mean_of


@register_estimator("my_method")
class MyMethod(GroupRelativeEstimator):
    """`A_hat_t = A * clip(exp(log P_blamed(y_t) - log P_student(y_t)), 1 - r, 1 + r)` where A < 0, and A elsewhere.

    `P_blamed` is the policy with the response's own wrong answer in its prompt as a sample answer. Degenerate cases,
    each exactly GRPO: r = 0; correct responses; wrong responses without an extractable answer. Source: an example of
    this repository.
    """

    class Config:
        clip_radius: float = Field(default=0.3, ge=0, lt=1, description="Clip range r of the weight.")
        teacher: TeacherConfig = TeacherConfig()

    views = ("blamed",)

    def references(self, group: RolloutGroup) -> dict[str, list[Reference | None]]:
        references: list[Reference | None] = [None] * len(group.rollouts)
        for row, rollout in enumerate(group.rollouts):
            if rollout.answer and not rollout.correct and not rollout.answer_equals_ground_truth:
                references[row] = TextReference(text=rollout.answer, source_index=rollout.index)
        return {"blamed": references}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask  # (B, T)
        advantages = group_advantages(batch.rewards, batch.group_ids).unsqueeze(1)  # (B, 1) A
        delta = (batch.teacher_log_probs["blamed"] - batch.old_log_probs).where(mask, 0.0)
        is_blamed = advantages < 0
        weight = statistics.evidence_weight(delta, is_blamed.to(delta.dtype), clip_radius=self.config.clip_radius)
        weight = weight.to(delta.dtype).where(mask, 0.0)
        metrics = statistics.group_metrics(batch)
        metrics["blame/weight_mean"] = mean_of(weight, mask & is_blamed)
        return TokenSignal(advantages=advantages * weight, metrics=metrics, diagnostics={"weight": weight})
