"""Implements SDPO, in which the student follows a slowly moving teacher with the right answer or a peer's success."""

from __future__ import annotations

from cepo.algorithms import register_estimator
from cepo.algorithms.opsd import Opsd
from cepo.algorithms.settings import DistillationConfig, TeacherConfig
from cepo.sections.fields import section
from cepo.types import DivergenceConfig


@register_estimator("sdpo")
class Sdpo(Opsd):
    """Distils like OPSD, with another divergence and a teacher whose weights are a moving average of the student's.

    `loss_t = weight (1/2 KL(P_correct || M) + 1/2 KL(P_student || M))_t` with `M = (P_correct + P_student) / 2`.
    Source: SDPO (2026), with the settings of the CEPO paper's comparison: decay 0.999, ground-truth answer.
    """

    @section
    class Config(Opsd.Config):
        distillation: DistillationConfig = DistillationConfig(divergence=DivergenceConfig(kind="jsd"))
        teacher: TeacherConfig = TeacherConfig(source="ema")

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
