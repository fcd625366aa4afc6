"""Tells plain nested data apart, as YAML and JSON files give it, so that type checkers know what an entry is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Returns whether the value is a section with keys."""
    return isinstance(value, Mapping)


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Returns whether the value is a section that can be changed."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Returns whether the value is a list."""
    return isinstance(value, list)
