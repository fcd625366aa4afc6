"""Keys of other programs that a method of this package replaces, and what is to be written in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cepo.algorithms.base import available_estimators, estimator_class

Replacement = Callable[[Any], Mapping[str, Any]]
"""From the value of a replaced key to the settings, by dotted key, that say the same here."""


def written_as(*keys: str) -> Replacement:
    """The same value under other keys."""
    return lambda value: dict.fromkeys(keys, value)


def where_set(settings: Mapping[str, Any]) -> Replacement:
    """These settings where the replaced key turns something on; none where it does not."""
    return lambda value: settings if str(value).lower() in ("true", "yes", "on", "1") else {}


def replaced_keys() -> dict[str, Replacement]:
    """All replaced keys, from every method's `replaced_keys`."""
    return {key: each for name in available_estimators() for key, each in estimator_class(name).replaced_keys.items()}


def replaced_families() -> tuple[str, ...]:
    """Beginnings `algorithm.<method>_` of the keys of which a method replaces some."""
    return tuple(f"algorithm.{name}_" for name in available_estimators() if estimator_class(name).replaced_keys)
