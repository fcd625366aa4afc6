"""Checks the adapter's `target_modules` against the model's layers, because PEFT ignores names that match nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from cepo.errors import ConfigError, did_you_mean

ALL_LINEAR = "all-linear"
_KEY = "worker.actor.model.lora.target_modules"


def target_names(target_modules: str) -> list[str]:
    """Splits the setting into module names; returns an empty list for `all-linear`."""
    return [] if target_modules == ALL_LINEAR else [name.strip() for name in target_modules.split(",")]


def require_targets(model: nn.Module, names: Sequence[str], *, excluded: str | None) -> None:
    """Checks that each name matches at least one layer of the model that is not excluded.

    As in PEFT, a name matches paths that equal it or end with it; `excluded` is a regular expression for whole paths.

    Raises:
        ConfigError: a name matches no layer; the message lists the model's layers.
    """
    paths = [path for path, _ in model.named_modules()]
    left = [path for path in paths if excluded is None or re.fullmatch(excluded, path) is None]
    for name in names:
        if any(_fits(path, name) for path in left):
            continue
        if any(_fits(path, name) for path in paths):
            raise ConfigError(f"{_KEY}: '{name}' matches only layers that exclude_modules '{excluded}' excludes")
        linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        known = sorted({path.rpartition(".")[2] for path in linear.intersection(left)})
        raise ConfigError(
            f"{_KEY}: '{name}' fits no layer of this model.{did_you_mean(name, known)} Its linear layers: {', '.join(known)}; "
            f"{ALL_LINEAR} takes all of them"
        )


def _fits(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
