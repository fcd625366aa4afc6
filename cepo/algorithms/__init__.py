"""Methods: each one module that is found by itself, behind the contract in `base`. Pure: tensors in, tensors out."""

from cepo.algorithms.base import (
    Estimator,
    available_estimators,
    build_config,
    build_estimator,
    estimator_class,
    load_plugin,
    register_estimator,
)

__all__ = [
    "Estimator",
    "available_estimators",
    "build_config",
    "build_estimator",
    "estimator_class",
    "load_plugin",
    "register_estimator",
]
