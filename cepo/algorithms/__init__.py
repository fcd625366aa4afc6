"""Implements the methods, one module each, found automatically; they are pure functions of tensors behind `base`."""

import importlib
import pkgutil

from cepo.algorithms import credit
from cepo.algorithms.base import Estimator, GroupRelativeEstimator
from cepo.algorithms.credit import group_advantages
from cepo.algorithms.evidence import EvidenceEstimator, WeightedEstimator
from cepo.algorithms.registry import (
    available_estimators,
    build_config,
    build_estimator,
    estimator_class,
    load_plugin,
    register_estimator,
    section_of,
)
from cepo.algorithms.settings import (
    AdvantageConfig,
    DistillationConfig,
    NegativeConfig,
    PositiveConfig,
    TeacherConfig,
    WeightConfig,
)

__all__ = [
    "AdvantageConfig",
    "DistillationConfig",
    "Estimator",
    "EvidenceEstimator",
    "GroupRelativeEstimator",
    "NegativeConfig",
    "PositiveConfig",
    "TeacherConfig",
    "WeightConfig",
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

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):  # each method registers itself
    importlib.import_module(_module.name)
