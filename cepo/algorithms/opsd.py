"""OPSD: the student's whole next-token distribution follows a teacher that has seen the right answer."""

from __future__ import annotations

from cepo.algorithms.base import register_estimator
from cepo.algorithms.distillation import DistillationEstimator
from cepo.algorithms.settings import DistillationConfig


@register_estimator("opsd")
class Opsd(DistillationEstimator):
    """`KL(P_correct || P_student)_t` over the whole vocabulary at each token of the student's own responses.

    Its gradient in the student's logits is `(P_student - P_correct) / temperature`.
    Source: OPSD (Zhao et al. 2026), with the settings of the CEPO paper's comparison: live teacher, ground-truth answer.
    """

    Config = DistillationConfig
