"""Handles other programs' keys, which `keys.yaml` lists: EasyR1's without effect here, its fork's, verl's and TRL's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field

from cepo.algorithms import available_estimators
from cepo.config.listing import written
from cepo.config.sources import Origins
from cepo.errors import ConfigError
from cepo.sections import read_section, section
from cepo.trees import Tree, leaves, put

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
class ForkKey:
    """A key of the fork, with the settings that take its value, and others to add always or if it is true."""

    same_value: list[str] = Field(default=[])
    also: Tree = Field(default={})
    if_true: Tree = Field(default={})

    def settings(self, value: object) -> Tree:
        """Returns the settings, by dotted key, that are equivalent to the fork's key with this value."""
        turned_on = str(value).lower() in ("true", "yes", "on", "1")
        return {**self.also, **dict.fromkeys(self.same_value, value), **(self.if_true if turned_on else {})}


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
    fork: dict[str, ForkKey] = Field()
    fork_families: list[str] = Field()
    elsewhere: dict[str, str] = Field()


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


def without_engine_keys(tree: Tree, origins: Origins) -> tuple[Tree, list[str]]:
    """Returns the resolved tree without keys that have no effect or no value, and the dotted keys without effect."""
    kept: Tree = {}
    without_effect: list[str] = []
    for key, value in leaves(tree, whole=EASYR1_KEYS):
        for name, own in TABLE.elsewhere.items():  # of verl and TRL
            if f"{key}.".startswith(f"{name}."):
                ours = own + key.removeprefix(name)
                raise origins.error(key, f"unknown key '{key}'. This is another program's name; here it is {ours}.")
        reason, entry = TABLE.unavailable.get(key, {}).get(str(value)), engine_key_of(key)
        if reason is not None:
            raise origins.error(key, f"{key}={value}: {reason}")
        if entry is not None and entry.only is not None and value != entry.only:
            raise origins.error(key, f"{key} must be {written(entry.only)}, got {written(value)}. {entry.remedy}")
        if entry is not None:
            without_effect.append(key)
        elif key not in TABLE.none_given or value != TABLE.none_given[key]:
            put(kept, key, value)
    return kept, without_effect


def report_engine_keys(without_effect: Sequence[str], origins: Origins) -> None:
    """Logs one warning that lists keys without effect and their places, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for key in without_effect:
        entry = engine_key_of(key)
        assert entry is not None
        by_reason.setdefault(entry.why, []).append(f"{key} ({origins.place_of(key)})")
    if by_reason:
        lines = [f"\n  {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]
        count = len(without_effect)
        logger.warning("%d EasyR1 key%s without effect here:%s", count, "s" if count > 1 else "", "".join(lines))


def refuse_fork_keys(tree: Tree, origins: Origins) -> None:
    """Raises `ConfigError` if the tree has keys of the fork; the message lists the equivalent settings."""
    families, methods = tuple(TABLE.fork_families), {f"algorithm.{name}" for name in available_estimators()}
    found = {
        key: value
        for key, value in leaves(tree, whole=EASYR1_KEYS)
        if key in TABLE.fork or (key.startswith(families) and ".".join(key.split(".")[:2]) not in methods)
    }
    if not found:
        return
    settings: Tree = {}
    for key, replacement in TABLE.fork.items():
        settings.update(replacement.settings(found[key]) if key in found else {})
    listed = "\n".join(f"  {key} ({origins.place_of(key)})" for key in found)
    message = f"These are keys of the CEPO authors' fork of EasyR1, which this package replaces:\n{listed}\n"
    if not settings:
        raise ConfigError(f"{message}Remove them; they need no replacement.")
    nested: Tree = {}
    for key, value in settings.items():
        put(nested, key, value)
    message += (
        f"Remove them. In a YAML file, write instead (replacing lines with the same key):\n\n"
        f"{yaml.safe_dump(nested, sort_keys=False)}\nOn the command line:\n\n"
        f"{' '.join(f'{key}={written(value)}' for key, value in settings.items())}\n"
    )
    without = [key for key in found if key not in TABLE.fork]
    raise ConfigError(f"{message}\nThese have no replacement: {', '.join(without)}." if without else message)
