"""Handles the keys of EasyR1 that have no effect here; `keys.yaml` lists them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field

from cepo.config.sources import Origins
from cepo.files.trees import Tree, leaves, nested
from cepo.sections.fields import section
from cepo.sections.messages import written
from cepo.sections.reader import read_section

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EasyR1Key:
    """A key of EasyR1: `kind` is its type, with `?` if null is accepted, `shipped` its value in EasyR1's YAML file."""

    kind: str
    default: object
    shipped: tuple[object, ...] = ()


@section
class WithoutEffect:
    """The reason why `keys`, or sections with these names, have no effect; `only` is the only value accepted."""

    why: str = Field()
    keys: list[str] = Field()
    only: bool | int | None = Field(default=None)
    remedy: str = Field(default="")


@section
class _Table:
    """The sections of `keys.yaml`, which are described there."""

    keys: dict[str, dict[str, list[object]]] = Field()
    internal: list[str] = Field()
    without_effect: list[WithoutEffect] = Field()
    unavailable: dict[str, dict[str, str]] = Field()
    none_given: Tree = Field()
    other_default: dict[str, str] = Field()
    other_meaning: dict[str, str] = Field()


TABLE = read_section(_Table, yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")))
EASYR1_KEYS: Mapping[str, EasyR1Key] = {
    f"{path}.{name}": EasyR1Key(str(kind), default, tuple(shipped))
    for path, keys in TABLE.keys.items()
    for name, (kind, default, *shipped) in keys.items()
}
ENGINE_KEYS: Mapping[str, WithoutEffect] = {key: entry for entry in TABLE.without_effect for key in entry.keys}


def engine_key_of(key: str) -> WithoutEffect | None:
    """Returns why a dotted key has no effect; None if it has an effect or is unknown."""
    name = key
    while name:
        if name in ENGINE_KEYS:
            return ENGINE_KEYS[name]
        name = name.rpartition(".")[0]
    return None


def is_explained(key: str) -> bool:
    """Returns whether a dotted key is EasyR1's, and `without_engine_keys` says what becomes of it."""
    return key in EASYR1_KEYS or engine_key_of(key) is not None


def without_engine_keys(tree: Tree, origins: Origins) -> tuple[Tree, dict[str, str]]:
    """Returns the resolved tree without keys that have no effect or no value, and why by dotted key without effect.

    Raises `ConfigError` for a value that is not available here.
    """
    remaining: Tree = {}
    without_effect: dict[str, str] = {}
    for key, value in leaves(tree, whole=EASYR1_KEYS):
        entry = engine_key_of(key)
        _require_available(key, value, entry, origins)
        has_no_value = key in TABLE.none_given and value == TABLE.none_given[key]
        if entry is not None:
            without_effect[key] = entry.why
        elif not has_no_value:
            remaining[key] = value
    return nested(remaining), without_effect


def _require_available(key: str, value: object, entry: WithoutEffect | None, origins: Origins) -> None:
    """Raises `ConfigError` for a value that is not available here, or that would change the result of a key without effect."""
    reason = TABLE.unavailable.get(key, {}).get(str(value))
    if reason is not None:
        raise origins.error(key, f"{key}={value}: {reason}")
    if entry is not None and entry.only is not None and value != entry.only:
        raise origins.error(key, f"{key} must be {written(entry.only)}, got {written(value)}. {entry.remedy}")


def report_engine_keys(without_effect: Mapping[str, str], origins: Origins) -> None:
    """Logs one warning that lists keys without effect and their places, grouped by reason."""
    if not without_effect:
        return
    by_reason: dict[str, list[str]] = {}
    for key, reason in without_effect.items():
        by_reason.setdefault(reason, []).append(f"{key} ({origins.place_of(key)})")
    lines: list[str] = []
    for reason, keys in by_reason.items():
        lines.append(f"\n  {reason}: {', '.join(keys)}")
    count = len(without_effect)
    plural = "s" if count > 1 else ""
    logger.warning("%d EasyR1 key%s without effect here:%s", count, plural, "".join(lines))
