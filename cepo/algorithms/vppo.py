"""Implements VPPO, in which only the tokens that depend on the image learn, and rollouts that depend on it more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.losses.kl import kl_penalty
from cepo.metrics import mean_of
from cepo.sections.fields import Count, NotNegative, Share, section
from cepo.types import ImageReference, Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView

EQUAL_SCORES = 1e-6
"""Rollouts whose scores differ by no more all have the scale 1."""


@register_estimator("vppo")
class Vppo(GroupRelativeEstimator):
    """Keeps GRPO's advantage A at the tokens that depend most on the image, and scales it by the rollout's dependence.

        k_t     = e^(-d) + d - 1,   d = log P_student(y_t) - log P_masked(y_t)      at most 10
        s_i     = mean of k_t over rollout i
        n_i     = (s_i - min s) / (max s - min s)                                   over the rollouts of the step
        scale_i = b + n_i (1 - b) / mean n                                          of mean 1
        A_hat_t = A scale_i [k_t is among the ceil(p T) highest of the response's T tokens] + c

    `P_masked` is the policy with the student's prompt, its images masked; p is `token_share`, b `scale_min`, c
    `log_prob_bonus`, which every response learns. min, max and mean are over the rollouts of groups whose rewards differ,
    with images. Degenerate cases: without images, or with p = 1, b = 1 and c = 0, it is GRPO; equal s_i give scale 1.
    Source: VPPO (arXiv 2510.09285), and its released code.
    """

    @section
    class Config(GroupConfig):
        mask_probability: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Probability that a patch of the teacher's image is black."""
        mask_square: Count | None = None
        """Side of the patches in pixels of the image before it is resized, 14 in the released code; null: the model's own
        patches, as it reads them."""
        token_share: Annotated[float, Field(gt=0, le=1)] = 0.4
        """Share of each response's tokens that learn."""
        scale_min: Share = 0.9
        """Scale of the advantage of the rollout that depends least on the image."""
        log_prob_bonus: NotNegative = 0.06
        """Added to every token's advantage: the released code's entropy penalty."""

    config: Config
    views = ("masked",)
    masks_images = True

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns the masked images, and nothing for groups of equal rewards, in which only the bonus is learned."""
        rewards = [rollout.reward for rollout in group.rollouts]
        is_flat = max(rewards) - min(rewards) < statistics.FLAT_REWARD_RANGE
        reference = (
            None if is_flat else ImageReference(masked=self.config.mask_probability, square=self.config.mask_square)
        )
        return {"masked": [reference] * len(group.rollouts)}

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns the rows of groups whose rewards differ; all with `log_prob_bonus`."""
        return statistics.live_rows(rewards, group_ids) | (self.config.log_prob_bonus > 0)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        config = self.config
        mask = batch.response_mask
        sees_images = batch.has_reference["masked"]  # (B,)
        is_live = statistics.live_rows(batch.rewards, batch.group_ids)
        is_counted = sees_images & is_live
        log_student = batch.old_log_probs.detach()
        log_masked = batch.teacher_log_probs["masked"].detach()
        dependence = kl_penalty(log_student, log_masked, "low_var_kl").where(mask, 0.0)  # k_t
        scores = statistics.response_means(dependence, mask)  # (B,) s_i
        scale = self._scale(scores, is_counted)
        depends_most = statistics.highest_tokens(dependence, mask, share=config.token_share)
        learns = depends_most | ~sees_images.unsqueeze(1)  # (B, T)

        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, config.advantage)
        shaped = (advantages * scale).unsqueeze(1) * learns + config.log_prob_bonus  # (B, T)
        metrics = statistics.group_metrics(batch)
        counted = mask & is_counted.unsqueeze(1)
        metrics["perception/dependence"] = mean_of(dependence, counted)
        metrics["perception/dependence_learning"] = mean_of(dependence, counted & learns)
        return TokenSignal(
            advantages=shaped.to(batch.rewards.dtype).where(mask, 0.0),
            metrics=metrics,
            diagnostics={
                "delta": (log_student - log_masked).where(mask, 0.0),
                "weight": (scale.unsqueeze(1) * learns).where(mask, 0.0),
            },
        )

    def _scale(self, scores: Float[Tensor, " B"], counted: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns scale_i from s_i; 1 for rollouts that are not `counted`, and if their scores are equal."""
        scale_min = self.config.scale_min  # b
        is_equal = scores.new_ones(scores.shape)
        of_counted = scores[counted]
        if of_counted.numel() < 2:
            return is_equal
        lowest = of_counted.min()
        spread = of_counted.max() - lowest
        if float(spread) <= EQUAL_SCORES:
            return is_equal
        normalised = (scores - lowest) / spread  # n_i
        mean = normalised[counted].mean()
        scale = scale_min + normalised * (1.0 - scale_min) / mean
        return scale.where(counted, 1.0)
