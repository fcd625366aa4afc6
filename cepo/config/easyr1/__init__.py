"""Handles the keys of EasyR1 that have no effect here, and those of its fork; `keys.yaml` lists them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field

from cepo.algorithms import available_estimators
from cepo.config.listing import written
from cepo.config.sources import Origins
from cepo.errors import ConfigError
from cepo.files.trees import Tree, leaves, nested
from cepo.sections.declaring import section
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
    fork: dict[str, list[str]] = Field()
    fork_families: list[str] = Field()


TABLE = read_section(_Table, yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")))
EASYR1_KEYS: Mapping[str, EasyR1Key] = {
    f"{path}.{name}": EasyR1Key(str(kind), default, tuple(shipped))
    for path, keys in TABLE.keys.items()
    for name, (kind, default, *shipped) in keys.items()
}
ENGINE_KEYS: Mapping[str, WithoutEffect] = {key: entry for entry in TABLE.without_effect for key in entry.keys}


def engine_key_of(key: str) -> WithoutEffect | None:
    """Returns why a dotted key has no effect; None if it has an effect or is unknown."""
    parts = key.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((ENGINE_KEYS[name] for name in around if name in ENGINE_KEYS), None)


def is_explained(key: str) -> bool:
    """Returns whether a dotted key is EasyR1's or its fork's, and `without_engine_keys` says what becomes of it."""
    return key in EASYR1_KEYS or engine_key_of(key) is not None or _is_forks(key)


def without_engine_keys(tree: Tree, origins: Origins) -> tuple[Tree, dict[str, str]]:
    """Returns the resolved tree without keys that have no effect or no value, and why by dotted key without effect.

    Raises `ConfigError` for keys of other programs, with what to write in their place.
    """
    kept: Tree = {}
    without_effect, replaced = dict[str, str](), list[str]()
    for key, value in leaves(tree, whole=EASYR1_KEYS):
        if _is_forks(key):
            replaced.append(f"\n  {key} ({origins.place_of(key)}): {_in_place_of(key, value)}")
        reason, entry = TABLE.unavailable.get(key, {}).get(str(value)), engine_key_of(key)
        if reason is not None:
            raise origins.error(key, f"{key}={value}: {reason}")
        if entry is not None and entry.only is not None and value != entry.only:
            raise origins.error(key, f"{key} must be {written(entry.only)}, got {written(value)}. {entry.remedy}")
        if entry is not None:
            without_effect[key] = entry.why
        elif key not in TABLE.none_given or value != TABLE.none_given[key]:
            kept[key] = value
    if replaced:
        raise ConfigError(
            "These are keys of the CEPO authors' fork of EasyR1, which this package replaces. Write in their place, in a file "
            f"as nested keys:{''.join(replaced)}"
        )
    return nested(kept), without_effect


def _is_forks(key: str) -> bool:
    methods = {f"algorithm.{name}" for name in available_estimators()}
    return key.startswith(tuple(TABLE.fork_families)) and ".".join(key.split(".")[:2]) not in methods


def _in_place_of(key: str, value: object) -> str:
    """Returns the arguments that are equivalent to the fork's key with this value."""
    is_on = str(value).lower() in ("true", "yes", "on", "1")
    settings = [*TABLE.fork.get(f"{key}=V", []), *(TABLE.fork.get(f"{key}=true", []) if is_on else [])]
    return " ".join(each.replace("=V", f"={written(value)}") for each in settings) or "nothing"


def report_engine_keys(without_effect: Mapping[str, str], origins: Origins) -> None:
    """Logs one warning that lists keys without effect and their places, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in without_effect.items():
        by_reason.setdefault(reason, []).append(f"{key} ({origins.place_of(key)})")
    if by_reason:
        lines = [f"\n  {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]
        count = len(without_effect)
        logger.warning("%d EasyR1 key%s without effect here:%s", count, "s" if count > 1 else "", "".join(lines))
