"""A sixth method in one file: a wrong response's tokens carry the more blame, the more its own wrong answer explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, register_estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.errors import require
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@register_estimator("my_method")
class MyMethod(Estimator):
    """`A_hat_t = A * clip(exp(log P_blamed(y_t) - log P_student(y_t)), 1 - r, 1 + r)` where A < 0, and A elsewhere.

    `P_blamed` is the policy after it has read the response's own wrong answer as a sample answer. A token that this makes
    likelier led there, and is pushed down harder. Degenerate cases, each exactly GRPO: r = 0, right responses, wrong ones
    without an extractable answer. Source: this repository, as an example.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`clip_radius` is r; `teacher` says whose weights teach and how the answer is worded."""

        clip_radius: float = 0.3
        teacher: TeacherConfig = field(default_factory=TeacherConfig)

        def __post_init__(self) -> None:
            require(0 <= self.clip_radius < 1, "clip_radius", self.clip_radius, "0 <= clip_radius < 1")

    config: Config
    views = ("blamed",)
    needs_group = True

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Each wrong response reads its own answer; None leaves the view with the student's log-probs."""
        return {
            "blamed": [
                None
                if own.correct or own.answer is None or own.answer_equals_ground_truth
                else Reference(text=own.answer, source_index=own.index)
                for own in group.rollouts
            ]
        }

    def needs_teacher(self, *, step: int) -> bool:
        """False where r = 0: the view could not change anything."""
        del step
        return self.config.clip_radius > 0

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Rollouts of groups whose rewards differ; all others have A = 0 and are not worth a pass."""
        from cepo.algorithms import credit  # needs torch, which reading a config must not load

        return credit.live_rows(rewards, group_ids)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """GRPO's advantages, scaled token by token in responses that are below their group's mean."""
        from cepo.algorithms import credit
        from cepo.metrics import mean_of

        mask, rewards = batch.response_mask, batch.rewards
        advantages = credit.group_advantages(rewards, batch.group_ids)
        metrics = credit.group_metrics(rewards, batch.correct, batch.group_ids)
        if not self.needs_teacher(step=step):
            return TokenSignal(advantages=credit.over_response(advantages, mask), metrics=metrics)
        # `evidence_weight` takes the sign of A, which is -1 wherever the weight is used.
        blame = (batch.old_log_probs - batch.teacher_log_probs["blamed"]).where(mask, 0.0)
        sign = credit.advantage_sign(advantages).clamp(max=0).unsqueeze(1)
        weight = credit.evidence_weight(blame, sign, clip_radius=self.config.clip_radius).to(rewards.dtype)
        metrics["blame/weight_mean"] = mean_of(weight, mask & (sign < 0))
        return TokenSignal(
            advantages=(advantages.unsqueeze(1) * weight).where(mask, 0.0),
            metrics=metrics,
            diagnostics={"delta": -blame, "weight": weight.where(mask, 0.0)},
        )
