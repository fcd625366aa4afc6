"""SDPO: the student follows a slowly moving teacher that reads the right answer or a peer's success."""

from __future__ import annotations

from cepo.algorithms.base import register_estimator
from cepo.algorithms.distillation import DistillationEstimator
from cepo.algorithms.settings import DistillationConfig, TeacherConfig
from cepo.sections import section
from cepo.types import DivergenceConfig


@register_estimator("sdpo")
class Sdpo(DistillationEstimator):
    """`JSD(P_correct, P_student)_t` with weight 0.5 and a teacher that averages the student's weights.

    Rewards only choose demonstrations; a rollout without one is masked.
    Source: SDPO (2026), with the settings of the CEPO paper's comparison: decay 0.999, ground-truth answer, full vocabulary.
    """

    @section
    class Config(DistillationConfig):
        """The distillation settings with this method's divergence and teacher."""

        divergence: DivergenceConfig = DivergenceConfig(kind="jsd")
        teacher: TeacherConfig = TeacherConfig(source="ema")

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
