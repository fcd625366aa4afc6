"""Keeps secrets out of a run's record: values of environment variables, and settings with secret-like names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cepo.trees import Tree, is_dict, is_list, is_mapping, texts_of

MASK = "***"
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\b")
_REFERENCE = re.compile(r"\$\{\s*([\w.-]+)\s*\}")
_SECRET_NAME = (
    r"(?:[\w-]*[_-])?(?:(?:api|access|private|secret|signing|encryption|ssh|openai|anthropic|azure|google|gemini|hf|wandb)"
    r"[_-]?key|secret|token|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|credentials?)"
)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_ENTRY = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?{_SECRET_NAME}[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|(?!\$\{{)[^,}}\]]+)",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+:[^/\s@]*(?=@)")

Path = tuple[str, ...]


def environment_references(tree: Mapping[str, object]) -> dict[Path, object]:
    """Returns the settings that take text from the environment, directly or through other settings.

    The result maps each setting's path to its unresolved text or list.
    """
    leaves = dict(_leaves(tree, ()))
    found = {path: value for path, value in leaves.items() if any(map(_ENVIRONMENT.search, texts_of(value)))}
    while True:
        more: dict[Path, object] = {}
        for path, value in leaves.items():
            named = [tuple(name.split(".")) for text in texts_of(value) for name in _REFERENCE.findall(text)]
            if path not in found and any(at[: len(to)] == to[: len(at)] for to in named for at in found):
                more[path] = value
        if not more:
            return found
        found.update(more)


def is_secret(name: str) -> bool:
    """Returns whether the name of a setting or an environment variable indicates a secret."""
    return _SECRET.fullmatch(name) is not None


def without_secrets(value: object, *, name: str = "") -> Any:
    """Returns settings with all texts masked whose names indicate a secret, and users and passwords in URLs."""
    if is_mapping(value):
        return {key: without_secrets(entry, name=str(key)) for key, entry in value.items()}
    if is_list(value):
        return [without_secrets(entry, name=name) for entry in value]
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(name) else _USER_IN_URL.sub(MASK, value)


def with_references(tree: Tree, references: Mapping[Path, object]) -> Tree:
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
    if separator and value and is_secret(key.rpartition(".")[2].lstrip("-")) and not value.startswith("${"):
        return f"{key}={MASK}"
    return _USER_IN_URL.sub(MASK, _SECRET_ENTRY.sub(rf"\g<name>{MASK}", argument))


def _leaves(tree: Mapping[str, object], path: Path) -> Iterator[tuple[Path, object]]:
    for key, value in tree.items():
        below = (*path, str(key))
        if is_mapping(value):
            yield from _leaves(value, below)
        else:
            yield below, value
