"""Registers methods by name, and builds them and their settings."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic.dataclasses import is_pydantic_dataclass

from cepo.algorithms import settings
from cepo.algorithms.base import Estimator
from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import Fields, Tree
from cepo.losses import available_losses
from cepo.sections.declaring import fields_of, section
from cepo.sections.reader import default_tree, read_section

_registry: dict[str, type[Estimator]] = {}
_plugins: dict[Path, list[str]] = {}
_EstimatorType = TypeVar("_EstimatorType", bound="type[Estimator]")
SHARED: Mapping[str, Any] = {name: field.annotation for name, field in fields_of(settings.SharedSettings).items()}
"""The types of the settings and sections of `algorithm` that methods share, by name."""


def register_estimator(name: str) -> Callable[[_EstimatorType], _EstimatorType]:
    """Decorates a class to register it as `algorithm.adv_estimator=<name>`, with its `Config` as a section.

    Raises `ConfigError`: another class has this name, or a field has the name of a shared section and another type.
    """

    def register(cls: _EstimatorType) -> _EstimatorType:
        if name in _registry:
            raise ConfigError(f"algorithm.adv_estimator '{name}' is already registered by {_registry[name].__module__}")
        cls.name = name
        if not is_pydantic_dataclass(cls.Config):
            cls.Config = section(cls.Config)
        for key, field in fields_of(cls.Config).items():
            own, kind = field.annotation, SHARED.get(key, field.annotation)
            if own is not kind and not (isinstance(own, type) and issubclass(kind, own)):
                raise ConfigError(
                    f"{cls.__qualname__}.Config.{key}: algorithm.{key} is shared by the methods and has the type "
                    f"{kind.__name__}; declare that type, or give the setting another name"
                )
        _registry[name] = cls
        return cls

    return register


def load_plugin(path: str | Path) -> list[str]:
    """Imports a user's Python file (`trainer.plugins`) once, and returns the methods and losses that it registers."""
    file = Path(path).expanduser().resolve()
    if file in _plugins:
        return _plugins[file]
    if not file.is_file():
        raise ConfigError(f"trainer.plugins: {path} is not a file; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"cepo_plugin_{file.stem}_{abs(hash(str(file))):x}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    methods_before, losses_before = set(_registry), set(available_losses())
    sys.modules[spec.name] = module  # where the types of its settings are looked up
    spec.loader.exec_module(module)
    new_methods = [name for name in _registry if name not in methods_before]
    new_losses = [name for name in available_losses() if name not in losses_before]
    _plugins[file] = [*new_methods, *new_losses]
    return _plugins[file]


def available_estimators() -> list[str]:
    """Returns the names of all methods: those of the modules in `cepo/algorithms/` and of loaded plugins."""
    return sorted(_registry)


def estimator_class(name: str) -> type[Estimator]:
    """Returns the class registered under `name`; raises a `ConfigError` that lists the known methods."""
    if name not in _registry:
        known = available_estimators()
        raise ConfigError(
            f"algorithm.adv_estimator '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    return _registry[name]


def own_fields(name: str) -> list[str]:
    """Returns the settings of the method that no other has, `algorithm.<name>.*`."""
    return [field for field in fields_of(estimator_class(name).Config) if field not in SHARED]


def path_of(name: str) -> str:
    """Returns the key before those of a method's settings in messages: `algorithm` if it has none of its own."""
    return f"algorithm.{name}" if own_fields(name) else "algorithm"


def presets_of(name: str) -> Tree:
    """Returns the method's defaults of the shared settings that it reads."""
    return {field: value for field, value in default_tree(estimator_class(name).Config).items() if field in SHARED}


def section_of(name: str, algorithm: Fields) -> Tree:
    """Returns the settings that the method reads, for `build_config`, out of a configuration's section `algorithm`."""
    read: Tree = {}
    for field, declared in fields_of(estimator_class(name).Config).items():
        if field in SHARED and field in algorithm:
            value = algorithm[field]
            if isinstance(value, Mapping):
                known = fields_of(cast("type[Any]", declared.annotation))
                value = {key: each for key, each in cast("Tree", value).items() if key in known}
            read[field] = value
    return read | dict(algorithm.get(name) or {})


def build_config(name: str, mapping: Fields | None) -> Any:
    """Builds the method's `Config` from what `section_of` returns; `ConfigError`: a key or value is not accepted."""
    return read_section(estimator_class(name).Config, mapping or {}, path=path_of(name))


def build_estimator(name: str, config: Fields | None = None) -> Estimator:
    """Builds the method `name` with the settings of its fields; raises `ConfigError` like `build_config`."""
    return estimator_class(name)(build_config(name, config))
