"""Implements PAPO, which rewards the policy for tokens that it would not have said without the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.losses.kl import kl_penalty
from cepo.metrics import mean_of
from cepo.sections.fields import Count, NotNegative, section
from cepo.types import ImageReference, Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView

LARGEST_KL = 10.0
"""Bound of the estimate k_t, above which it has no gradient."""
LARGEST_LOG_RATIO = 20.0
"""Likewise of |d_t|."""


@register_estimator("papo")
class Papo(GroupRelativeEstimator):
    """Adds the gradient of the implicit perception loss to GRPO's advantage A.

        d_t     = log P_student(y_t) - log P_masked(y_t)
        k_t     = e^(-d_t) + d_t - 1                          the loss is -gamma k_t
        A_hat_t = A + gamma (1 - e^(-d_t)) [k_t < 10] + c

    `P_masked` is the policy with the student's prompt, its images masked; gamma is `perception_weight`, c
    `log_prob_bonus`. The derivative of k_t with respect to log P_student is 1 - e^(-d_t), so on policy the policy loss
    with A_hat has the gradient of the published loss; in later updates of a step d_t stays that of the first. Degenerate
    cases: gamma = 0 and c = 0 is GRPO; without images gamma counts as 0. Source: PAPO (arXiv 2507.06448), and its released
    code, in which P_masked has no gradient either.
    """

    @section
    class Config(GroupConfig):
        mask_probability: Annotated[float, Field(gt=0, le=1)] = 0.6
        """Probability that a patch of the teacher's image is black."""
        mask_square: Count | None = None
        """Side of the patches in pixels of the image before it is resized, 14 in the released code; null: the model's own
        patches, as it reads them."""
        perception_weight: NotNegative = 0.02
        """Weight gamma of the implicit perception loss."""
        log_prob_bonus: NotNegative = 0.05
        """Added to every token's advantage: the released code's entropy loss on the original image."""

    config: Config
    views = ("masked",)
    masks_images = True

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        reference = ImageReference(masked=self.config.mask_probability, square=self.config.mask_square)
        return {"masked": [reference] * len(group.rollouts)}

    def needs_teacher(self, *, step: int) -> bool:
        return self.config.perception_weight > 0

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns the rows with an advantage or with images; all with `log_prob_bonus`."""
        has_advantage = statistics.live_rows(rewards, group_ids)
        return has_advantage | has_reference["masked"] | (self.config.log_prob_bonus > 0)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask
        metrics = statistics.group_metrics(batch)
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        shaped = advantages.unsqueeze(1) + self.config.log_prob_bonus  # (B, 1)
        diagnostics: dict[str, Tensor] = {}
        if self.needs_teacher(step=step):
            log_student = batch.old_log_probs.detach()
            log_masked = batch.teacher_log_probs["masked"].detach()
            delta = (log_student - log_masked).where(mask, 0.0)  # (B, T) d_t
            divergence = kl_penalty(log_student, log_masked, "low_var_kl")  # k_t
            is_small_divergence = divergence < LARGEST_KL
            is_small_ratio = delta.abs() < LARGEST_LOG_RATIO
            sees_image = mask & batch.has_reference["masked"].unsqueeze(1)
            has_gradient = is_small_divergence & is_small_ratio & sees_image
            derivative = 1.0 - (-delta).exp()  # of k_t in log P_student
            derivative = derivative.where(has_gradient, 0.0)
            shaped = shaped + self.config.perception_weight * derivative  # (B, T)
            diagnostics["delta"] = delta
            metrics["perception/dependence"] = mean_of(divergence, sees_image)
            metrics["perception/advantage"] = mean_of(derivative, sees_image)
        shaped = shaped.expand(mask.shape).to(batch.rewards.dtype)
        return TokenSignal(advantages=shaped.where(mask, 0.0), metrics=metrics, diagnostics=diagnostics)
