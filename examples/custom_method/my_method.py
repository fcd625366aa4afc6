"""Defines a method in one file: the more a wrong response's answer explains a token, the more blame the token gets."""

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, TeacherConfig, credit, group_advantages, register_estimator
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal, mean_of


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
        wrong = [own.answer and not own.correct and not own.answer_equals_ground_truth for own in group.rollouts]
        answers = [Reference(text=own.answer, source_index=own.index) if own.answer else None for own in group.rollouts]
        return {"blamed": [answer if shown else None for answer, shown in zip(answers, wrong, strict=True)]}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask, advantages = batch.response_mask, group_advantages(batch.rewards, batch.group_ids)
        delta = (batch.teacher_log_probs["blamed"] - batch.old_log_probs).where(mask, 0.0)
        blamed = (advantages < 0).to(delta.dtype).unsqueeze(1)  # where the weight is not 1
        weight = credit.evidence_weight(delta, blamed, clip_radius=self.config.clip_radius).to(delta.dtype)
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        metrics["blame/weight_mean"] = mean_of(weight, mask & (blamed > 0))
        weighted = (advantages.unsqueeze(1) * weight).where(mask, 0.0)
        return TokenSignal(advantages=weighted, metrics=metrics, diagnostics={"delta": delta, "weight": weight * mask})
