"""Registers a control of the study: cepo with its two teachers exchanged (`algorithm.adv_estimator=inverted_cepo`)."""

from __future__ import annotations

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo


@register_estimator("inverted_cepo")
class InvertedCepo(Cepo):
    """`w_t = clip(exp(-sign(A) delta_t), 1 - r, 1 + r)`: tokens that cepo credits more than others are credited less."""

    contrast = ("wrong", "correct")
