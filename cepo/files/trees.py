"""Handles nested data from YAML and JSON files: narrows its types, lists its leaves, changes its strings."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeGuard

Tree = dict[str, Any]
"""Nested data by key, as YAML and JSON files have it: texts, numbers, truth values, nulls, lists and mappings."""
Fields = Mapping[str, Any]
"""A `Tree` or a row of a table that is only read."""


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def with_texts(value: object, change: Callable[[str], str]) -> Any:
    """Returns the data with `change` applied to every string; keys are unchanged."""
    if is_mapping(value):
        return {key: with_texts(entry, change) for key, entry in value.items()}
    if is_list(value):
        return [with_texts(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def texts_of(value: object) -> Iterator[str]:
    """Yields the strings of nested data, keys included."""
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        for key, entry in value.items():
            yield from texts_of(key)
            yield from texts_of(entry)
    elif is_list(value):
        for entry in value:
            yield from texts_of(entry)


def nested(values: Fields) -> Tree:
    """Returns the tree with these values at their dotted keys, the inverse of `leaves`."""
    tree: Tree = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        section = tree
        for section_name in sections:
            if not is_dict(section.get(section_name)):  # a key that itself has a dot can name a value as a section
                section[section_name] = {}
            section = section[section_name]
        section[name] = value
    return tree


def leaves(tree: object, path: str = "", *, whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of nested mappings with their values; empty mappings, and those at `whole` keys, are values."""
    if is_mapping(tree) and tree and path not in whole:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), whole=whole)
    else:
        yield path, tree
