"""Registers methods by name, builds them and their settings, and loads plug-ins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, get_args

from cepo.algorithms import settings
from cepo.algorithms.base import BatchField, Estimator
from cepo.errors import ConfigError, near_path
from cepo.files.trees import Fields, Tree, is_mapping
from cepo.losses import available_losses
from cepo.sections.reader import read_section
from cepo.sections.registry import Registry

METHODS: Registry[Estimator] = Registry(
    "algorithm.adv_estimator", settings.SharedSettings, Estimator, decorator="register_estimator"
)
_plugins: dict[Path, list[str]] = {}


register_estimator = METHODS.register
"""Decorates a class to register it as `algorithm.adv_estimator=<name>`, with its `Config` as a section.

Raises `ConfigError`: another class has this name, the class does not derive from `Estimator` or lacks `signal`, or a
field has the name of a shared section and another type.
"""
available_estimators = METHODS.names
"""Returns the names of all methods: those of the modules in `cepo/algorithms/` and of loaded plugins."""
estimator_class = METHODS.class_of
"""Returns the class registered under a name; raises a `ConfigError` that lists the known methods."""


def load_plugin(path: str | Path) -> list[str]:
    """Imports a user's Python file (`trainer.plugins`) once, and returns the methods and losses that it registers."""
    file = Path(path).expanduser().resolve()
    if file in _plugins:
        return _plugins[file]
    if not file.is_file():
        raise ConfigError(f"trainer.plugins: {path} is not a file; give the path of a Python file.{near_path(path)}")
    spec = importlib.util.spec_from_file_location(f"cepo_plugin_{file.stem}_{abs(hash(str(file))):x}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    methods_before = available_estimators()
    losses_before = available_losses()
    sys.modules[spec.name] = module  # where the types of its settings are looked up
    spec.loader.exec_module(module)
    new_methods = [name for name in METHODS.classes if name not in methods_before]
    new_losses = [name for name in available_losses() if name not in losses_before]
    _plugins[file] = [*new_methods, *new_losses]
    return _plugins[file]


def path_of(name: str) -> str:
    """Returns the key before those of a method's settings in messages: `algorithm` if it has none of its own."""
    return f"algorithm.{name}" if METHODS.own_fields(name) else "algorithm"


def section_of(name: str, algorithm: Fields) -> Tree:
    """Returns the settings that the method reads, for `build_config`, out of a configuration's section `algorithm`."""
    own: object = algorithm.get(name) or {}
    if not is_mapping(own):
        raise ConfigError(f"algorithm.{name} must be a mapping of keys to values, got {own!r:.100}.")
    return METHODS.settings_of(name, shared=algorithm, own=own)


def build_config(name: str, mapping: Fields | None) -> Any:
    """Builds the method's `Config` from what `section_of` returns; `ConfigError`: a key or value is not accepted."""
    return read_section(estimator_class(name).Config, mapping or {}, path=path_of(name))


def build_estimator(name: str, config: Fields | None = None) -> Estimator:
    """Builds the method `name` with the settings of its fields.

    Raises `ConfigError` like `build_config`, if the method's `reads` names what a batch does not have, and if it has
    teachers in `views` without saying in `references` what they read.
    """
    estimator = estimator_class(name)(build_config(name, config))
    class_name = type(estimator).__qualname__
    if isinstance(estimator.views, str):
        raise ConfigError(f"{class_name}.views is the text '{estimator.views}'; write a tuple, ('{estimator.views}',)")
    if estimator.views and type(estimator).references is Estimator.references:
        raise ConfigError(
            f"{class_name} has the teachers {list(estimator.views)} in views, and must define references(self, group), "
            "which returns what each of them reads"
        )
    known = get_args(BatchField)
    for field in estimator.reads:
        if field not in known:
            raise ConfigError(
                f"{class_name}.reads names '{field}', which is no field that a method can ask for; "
                f"known: {', '.join(known)}"
            )
    return estimator
