"""Defines a method in one file: tokens that the image makes more likely get more of the advantage."""

from torch import Tensor

from cepo.algorithms import AdvantageConfig, TeacherConfig, WeightConfig, WeightedEstimator, register_estimator
from cepo.types import Reference, RolloutGroup, TextReference, TokenBatch


@register_estimator("visible")
class Visible(WeightedEstimator):
    """`delta_t = log P_student(y_t) - log P_blind(y_t)`, `A_hat_t = A clip(exp(sign(A) delta_t), 1 - r, 1 + r)`.

    `P_blind` is the policy that reads the question without its image, and a line that says so. Degenerate case: r = 0 is
    exactly GRPO. Source: an example of this repository.
    """

    class Config:
        advantage: AdvantageConfig = AdvantageConfig()
        weight: WeightConfig = WeightConfig(clip_radius=0.3, lambda_init=1.0, lambda_schedule="constant")
        teacher: TeacherConfig = TeacherConfig(with_images=False, placement="assistant_prefix")

    views = ("blind",)

    def references(self, group: RolloutGroup) -> dict[str, list[Reference]]:
        return {"blind": [TextReference(text="The image is not shown.")] * len(group.rollouts)}

    def evidence(self, batch: TokenBatch) -> Tensor:
        return batch.old_log_probs - batch.teacher_log_probs["blind"]  # (B, T) delta_t
