"""Registers policy losses by name, and builds them and their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic.dataclasses import is_pydantic_dataclass

from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import Fields, Tree
from cepo.losses.base import PolicyLoss
from cepo.losses.settings import SharedLossSettings
from cepo.sections.declaring import fields_of, section
from cepo.sections.reader import default_tree, read_section

_registry: dict[str, type[PolicyLoss]] = {}
_LossType = TypeVar("_LossType", bound="type[PolicyLoss]")
SHARED = frozenset(fields_of(SharedLossSettings))
"""The settings of `worker.actor` that losses share."""


def register_loss(name: str) -> Callable[[_LossType], _LossType]:
    """Decorates a subclass of `PolicyLoss` to register it as `worker.actor.loss_type=<name>`.

    Raises `ConfigError`: another class has this name.
    """

    def register(cls: _LossType) -> _LossType:
        if name in _registry:
            raise ConfigError(f"worker.actor.loss_type '{name}' is already registered by {_registry[name].__module__}")
        if not is_pydantic_dataclass(cls.Config):
            cls.Config = section(cls.Config)
        cls.name = name
        _registry[name] = cls
        return cls

    return register


def available_losses() -> list[str]:
    """Returns the names of all losses: those of `cepo/losses/` and of loaded plugins."""
    return sorted(_registry)


def loss_class(name: str) -> type[PolicyLoss]:
    """Returns the class registered under `name`; raises a `ConfigError` that lists the known losses."""
    if name not in _registry:
        known = available_losses()
        raise ConfigError(
            f"worker.actor.loss_type '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}; a loss of "
            "your own is registered by a file in trainer.plugins"
        )
    return _registry[name]


def own_loss_fields(name: str) -> list[str]:
    """Returns the settings that the loss alone has, `worker.actor.loss.<name>.*`."""
    return [field for field in fields_of(loss_class(name).Config) if field not in SHARED]


def loss_presets_of(name: str) -> Tree:
    """Returns the loss's defaults of the settings of `worker.actor` that it reads."""
    return {key: value for key, value in default_tree(loss_class(name).Config).items() if key in SHARED}


def section_of(name: str, actor: Fields) -> Tree:
    """Returns the settings that the loss reads, for `build_loss`, out of a configuration's section `worker.actor`."""
    shared = {key: actor[key] for key in fields_of(loss_class(name).Config) if key in SHARED and key in actor}
    sections: Fields = actor.get("loss") or {}
    own: Fields = sections.get(name) or {}
    return {**shared, **own}


def build_loss_config(name: str, mapping: Fields | None = None) -> Any:
    """Builds the loss's `Config` from what `section_of` returns; `ConfigError`: a key or value is not accepted."""
    return read_section(loss_class(name).Config, mapping or {}, path=f"worker.actor.loss.{name}")


def build_loss(name: str, mapping: Fields | None = None) -> PolicyLoss:
    """Builds the loss `name`, by default with its default settings; raises `ConfigError` like `build_loss_config`."""
    return loss_class(name)(build_loss_config(name, mapping))
