"""Keeps secrets out of a run's record: values of environment variables, and settings with secret-like names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cepo.trees import is_dict, is_list, is_mapping

MASK = "***"
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\b")
_REFERENCE = re.compile(r"\$\{\s*([\w.-]+)\s*\}")
_SECRET_NAME = r"(?:[\w-]*[_-])?(?:api_?key|access_?key|secret|token|password|passwd|credentials?)"
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_ENTRY = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?{_SECRET_NAME}[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|(?!\$\{{)[^\s,}}\]]+)",
    re.IGNORECASE,
)

Path = tuple[str, ...]


def environment_references(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """Returns the settings that take text from the environment, directly or through other settings.

    The result maps each setting's path to its unresolved text or list.
    """
    leaves = dict(_leaves(tree, ()))
    found = {path: value for path, value in leaves.items() if any(map(_ENVIRONMENT.search, _texts(value)))}
    while True:
        more = {
            path: value
            for path, value in leaves.items()
            if path not in found
            and any(_reaches(name, found) for text in _texts(value) for name in _REFERENCE.findall(text))
        }
        if not more:
            return found
        found.update(more)


def without_secrets(tree: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
    """Returns the tree with masked texts of all settings whose names indicate a secret."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if is_mapping(value):
            kept[key] = without_secrets(value, (*path, str(key)))
        else:
            is_secret = isinstance(value, str) and value and _SECRET.fullmatch(str(key))
            kept[key] = MASK if is_secret else value
    return kept


def with_references(tree: dict[str, Any], references: Mapping[Path, Any]) -> dict[str, Any]:
    """Restores the unresolved text of settings that read the environment; changes and returns `tree`."""
    for path, text in references.items():
        section = tree
        for name in path[:-1]:
            section = section.get(name) if is_dict(section) else None
        if is_dict(section) and path[-1] in section:
            section[path[-1]] = text
    return tree


def masked_argument(argument: str) -> str:
    """Returns a command-line argument `a.b=value` with the values of secret settings masked."""
    key, separator, value = argument.partition("=")
    if separator and value and _SECRET.fullmatch(key.rpartition(".")[2].lstrip("-")) and not value.startswith("${"):
        return f"{key}={MASK}"
    return _SECRET_ENTRY.sub(rf"\g<name>{MASK}", argument)


def _leaves(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        below = (*path, str(key))
        if is_mapping(value):
            yield from _leaves(value, below)
        else:
            yield below, value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_list(value):
        for entry in value:
            yield from _texts(entry)
    elif is_mapping(value):
        for entry in value.values():
            yield from _texts(entry)


def _reaches(name: str, found: Mapping[Path, Any]) -> bool:
    parts = tuple(name.split("."))
    return any(path[: len(parts)] == parts or parts[: len(path)] == path for path in found)
