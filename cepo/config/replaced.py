"""Keys of the authors' fork of EasyR1: an error that gives the lines to paste in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cepo.algorithms import available_estimators
from cepo.algorithms.replaced import replaced_families, replaced_keys
from cepo.config.sources import Origins
from cepo.errors import ConfigError


def refuse_replaced_keys(tree: Mapping[str, Any], origins: Origins) -> None:
    """Raise `ConfigError` where the tree has keys of the fork; the message gives the same settings in this package's keys."""
    known, families = replaced_keys(), replaced_families()
    sections = {f"algorithm.{name}" for name in available_estimators()}
    found = {
        key: value
        for key, value in _leaves(tree)
        if key in known or (key.startswith(families) and ".".join(key.split(".")[:2]) not in sections)
    }
    if not found:
        return
    settings: dict[str, Any] = {}
    for key, replacement in known.items():
        settings.update(replacement(found[key]) if key in found else {})
    without = [key for key in found if key not in known]
    listed = "\n".join(f"  {key} ({origins.place_of(key)})" for key in found)
    message = f"These are keys of the CEPO authors' fork of EasyR1, which this package replaces:\n{listed}\n"
    if settings:
        arguments = " ".join(f"{key}={_word(value)}" for key, value in settings.items())
        message += (
            f"Remove them. In a YAML file, write instead (each line in place of one of the same key):\n\n"
            f"{yaml.safe_dump(_nested(settings), sort_keys=False)}\nOn the command line:\n\n{arguments}\n"
        )
    else:
        message += "Remove them; nothing has to take their place."
    if without and settings:
        message += f"\nNothing takes the place of {', '.join(without)}."
    raise ConfigError(message)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree
