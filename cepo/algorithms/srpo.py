"""Implements SRPO, in which right rollouts learn from their advantage and wrong ones from a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import register_estimator
from cepo.algorithms.opsd import Opsd
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import DistillationConfig, PositiveConfig, TeacherConfig
from cepo.sections.fields import section
from cepo.types import DivergenceConfig, Reference, RolloutGroup, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("srpo")
class Srpo(Opsd):
    """Routes each rollout to one of two losses: GRPO's, or the distillation of SDPO.

        right, or without a reference:   the policy loss with policy_weight A
        wrong, with a reference:         weight D(P_correct, P_student)_t min(P_student / P_old, 2) w_t
                                         w_t = exp(-beta H_t) / mean of exp(-beta H)

    A is GRPO's advantage, D by default the Jensen-Shannon divergence over the student's 100 most probable tokens and the
    rest, and the teacher reads a right response of the group. H_t is the entropy of P_correct in nats, beta
    `entropy_beta`, and the mean is over the tokens of an optimizer step that are distilled. A token has weight 0 in one
    of the losses, so both share their denominators. Degenerate cases: a group without a right response is GRPO's;
    `weight = 0` is GRPO. Source: SRPO (arXiv 2604.02288), as RLCSD's repository implements it.
    """

    @section
    class Config(Opsd.Config):
        distillation: DistillationConfig = DistillationConfig(
            policy_weight=1.0,
            divergence=DivergenceConfig(kind="jsd", support="topk", importance_clip=2.0, entropy_beta=1.0),
        )
        positive: PositiveConfig = PositiveConfig(source="peer_full")
        teacher: TeacherConfig = TeacherConfig(source="ema", ema_decay=0.95)

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns the right answer for wrong rollouts alone."""
        references = positive_references(group, self.config.positive)
        for row, rollout in enumerate(group.rollouts):
            if rollout.correct:
                references[row] = None
        return {"correct": references}

    def policy_advantages(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Returns `policy_weight A`, and 0 for rollouts that learn from the teacher."""
        advantages = super().policy_advantages(batch)
        if self.config.distillation.weight == 0:
            return advantages
        return advantages.where(~batch.has_reference["correct"].unsqueeze(1), 0.0)
