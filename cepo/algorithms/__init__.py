"""Implements the methods, one module each, found automatically; they are pure functions of tensors behind `base`."""

import importlib
import pkgutil
import warnings

from cepo.algorithms import statistics
from cepo.algorithms.base import Estimator, GroupRelativeEstimator
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
from cepo.algorithms.statistics import group_advantages

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
    "estimator_class",
    "group_advantages",
    "load_plugin",
    "register_estimator",
    "section_of",
    "statistics",
]


def __getattr__(name: str) -> object:
    """Gives methods of users the name `credit`, which `statistics` had up to version 0.4."""
    if name == "credit":
        warnings.warn(f"{__name__}.credit is now {__name__}.statistics", DeprecationWarning, stacklevel=2)
        return statistics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):  # each method registers itself
    importlib.import_module(_module.name)
