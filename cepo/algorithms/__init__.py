"""Implements the methods, one module each, found automatically; they are pure functions of tensors behind `base`."""

from cepo.algorithms import credit
from cepo.algorithms.base import (
    Estimator,
    EvidenceEstimator,
    GroupRelativeEstimator,
    WeightedEstimator,
    available_estimators,
    build_config,
    build_estimator,
    estimator_class,
    load_plugin,
    register_estimator,
    section_of,
)
from cepo.algorithms.credit import group_advantages

__all__ = [
    "Estimator",
    "EvidenceEstimator",
    "GroupRelativeEstimator",
    "WeightedEstimator",
    "available_estimators",
    "build_config",
    "build_estimator",
    "credit",
    "estimator_class",
    "group_advantages",
    "load_plugin",
    "register_estimator",
    "section_of",
]
