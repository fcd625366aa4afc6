"""Registers policy losses by name, and builds them and their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cepo.files.trees import Fields, Tree
from cepo.losses.base import PolicyLoss
from cepo.losses.settings import SharedLossSettings
from cepo.sections.reader import read_section
from cepo.sections.registry import Registry

_LossType = TypeVar("_LossType", bound="type[PolicyLoss]")
LOSSES: Registry[PolicyLoss] = Registry(
    "worker.actor.loss_type",
    SharedLossSettings,
    PolicyLoss,
    decorator="register_loss",
    hint="; a loss of your own is registered by a file in trainer.plugins",
)
SHARED = frozenset(LOSSES.shared)
"""The settings of `worker.actor` that losses share."""


def register_loss(name: str) -> Callable[[_LossType], _LossType]:
    """Decorates a subclass of `PolicyLoss` to register it as `worker.actor.loss_type=<name>`.

    Raises `ConfigError`: another class has this name, the class does not derive from `PolicyLoss` or lacks a function, or
    a field has the name of a shared setting and another type.
    """
    return LOSSES.register(name)


def available_losses() -> list[str]:
    """Returns the names of all losses: those of `cepo/losses/` and of loaded plugins."""
    return LOSSES.names()


def loss_class(name: str) -> type[PolicyLoss]:
    """Returns the class registered under `name`; raises a `ConfigError` that lists the known losses."""
    return LOSSES.class_of(name)


def own_loss_fields(name: str) -> list[str]:
    """Returns the settings that the loss alone has, `worker.actor.loss.<name>.*`."""
    return LOSSES.own_fields(name)


def loss_presets_of(name: str) -> Tree:
    """Returns the loss's defaults of the settings of `worker.actor` that it reads."""
    return LOSSES.presets_of(name)


def section_of(name: str, actor: Fields) -> Tree:
    """Returns the settings that the loss reads, for `build_loss`, out of a configuration's section `worker.actor`."""
    sections: Fields = actor.get("loss") or {}
    return LOSSES.settings_of(name, shared=actor, own=sections.get(name) or {})


def build_loss_config(name: str, mapping: Fields | None = None) -> Any:
    """Builds the loss's `Config` from what `section_of` returns; `ConfigError`: a key or value is not accepted."""
    return read_section(loss_class(name).Config, mapping or {}, path=f"worker.actor.loss.{name}")


def build_loss(name: str, mapping: Fields | None = None) -> PolicyLoss:
    """Builds the loss `name`, by default with its default settings; raises `ConfigError` like `build_loss_config`."""
    return loss_class(name)(build_loss_config(name, mapping))
