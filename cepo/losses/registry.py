"""Registers policy losses by name, and builds them and their settings."""

from __future__ import annotations

from cepo.files.trees import Fields, Tree
from cepo.losses.base import PolicyLoss
from cepo.losses.settings import SharedLossSettings
from cepo.sections.reader import read_section
from cepo.sections.registry import Registry

LOSSES: Registry[PolicyLoss] = Registry(
    "worker.actor.loss_type",
    SharedLossSettings,
    PolicyLoss,
    decorator="register_loss",
    hint="; a loss of your own is registered by a file in trainer.plugins",
)


register_loss = LOSSES.register
"""Decorates a subclass of `PolicyLoss` to register it as `worker.actor.loss_type=<name>`.

Raises `ConfigError`: another class has this name, the class does not derive from `PolicyLoss` or lacks a function, or a
field has the name of a shared setting and another type.
"""
available_losses = LOSSES.names
"""Returns the names of all losses: those of `cepo/losses/` and of loaded plugins."""
loss_class = LOSSES.class_of
"""Returns the class registered under a name; raises a `ConfigError` that lists the known losses."""


def section_of(name: str, actor: Fields) -> Tree:
    """Returns the settings that the loss reads, for `build_loss`, out of a configuration's section `worker.actor`."""
    sections: Fields = actor.get("loss") or {}
    return LOSSES.settings_of(name, shared=actor, own=sections.get(name) or {})


def build_loss(name: str, mapping: Fields | None = None) -> PolicyLoss:
    """Builds the loss `name` with the settings that `section_of` returns, by default with its own defaults.

    Raises `ConfigError`: a key or value is not accepted.
    """
    cls = loss_class(name)
    return cls(read_section(cls.Config, mapping or {}, path=f"worker.actor.loss.{name}"))
