"""Defines a method in one file: tokens that the image makes more likely get more of the advantage."""

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, TeacherConfig, group_advantages, register_estimator, statistics
from cepo.types import Reference, RolloutGroup, TextReference, TokenBatch, TokenSignal


@register_estimator("visible")
class Visible(GroupRelativeEstimator):
    """`delta_t = log P_student(y_t) - log P_blind(y_t)`, `A_hat_t = A clip(exp(sign(A) delta_t), 1 - r, 1 + r)`.

    `P_blind` is the policy that reads the question without its image, and a line that says so. Degenerate case: r = 0 is
    exactly GRPO. Source: an example of this repository.
    """

    class Config:
        clip_radius: float = Field(default=0.3, ge=0, lt=1, description="Clip range r of the weight.")
        teacher: TeacherConfig = TeacherConfig(with_images=False, placement="assistant_prefix")

    views = ("blind",)

    def references(self, group: RolloutGroup) -> dict[str, list[Reference]]:
        return {"blind": [TextReference(text="The image is not shown.")] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask  # (B, T)
        advantages = group_advantages(batch.rewards, batch.group_ids).unsqueeze(1)  # (B, 1) A
        delta = (batch.old_log_probs - batch.teacher_log_probs["blind"]).where(mask, 0.0)
        sign = statistics.advantage_sign(advantages)
        weight = statistics.evidence_weight(delta, sign, clip_radius=self.config.clip_radius)
        weight = weight.to(delta.dtype).where(mask, 0.0)
        metrics = statistics.group_metrics(batch)
        diagnostics = {"delta": delta, "weight": weight}
        return TokenSignal(advantages=advantages * weight, metrics=metrics, diagnostics=diagnostics)
