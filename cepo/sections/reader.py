"""Reads sections of settings from nested data, and merges them with their defaults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import ErrorDetails

from cepo.errors import ConfigError
from cepo.files.trees import Fields, Tree
from cepo.sections.fields import fields_of
from cepo.sections.messages import Fault, Wording

_Section = TypeVar("_Section")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class SectionError(ConfigError):
    """A section cannot be read; the message has one line for each fault."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(fault.message for fault in faults))
        self.faults = faults


def read_section(
    kind: type[_Section],
    tree: Any,
    *,
    path: str = "",
    texts: Mapping[str, str] | None = None,
) -> _Section:
    """Reads the section `kind` from a mapping. Missing keys keep their defaults, also inside nested sections.

    Text that spells a number or a boolean is converted, as are 0 and 1 for a boolean. Where text is expected, a number
    is replaced by its entry in `texts`, the original text of values that YAML read as numbers, by dotted key. No other value
    changes its type. `path` is the dotted key of the section itself.

    Raises `SectionError` for an unknown key, a wrong type, a value out of bounds, or a missing setting.
    """
    adapter = TypeAdapter(kind)
    values = tree
    if isinstance(tree, Mapping):
        values = merged_trees(default_tree(kind), cast("Tree", tree))
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    words = Wording(adapter.json_schema(), path)
    was_respelled = False
    for error in errors:
        if _respelled(values, words, error, texts or {}):
            was_respelled = True
    if was_respelled:  # the other errors remain, and are found again
        return read_section(kind, values, path=path, texts=texts)
    raise SectionError(words.faults(errors))


def default_tree(kind: type[Any]) -> Tree:
    """Returns the defaults of a section as a plain tree, without the settings that have no default."""
    tree: Tree = {}
    for name, field in fields_of(kind).items():
        is_section = isinstance(field.annotation, type) and is_pydantic_dataclass(field.annotation)
        default: Any = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
        if is_section and default is None:
            tree[name] = default_tree(cast("type[Any]", field.annotation))
        elif is_section:
            tree[name] = dataclasses.asdict(default)
        elif not field.is_required():
            tree[name] = default
    return tree


def merged_trees(below: Tree, above: Fields) -> Tree:
    """Merges `above` into a copy of `below`: mappings are merged, everything else is replaced."""
    tree = copy.deepcopy(below)
    for name, value in above.items():
        inner = tree.get(name)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            tree[name] = merged_trees(cast("Tree", inner), cast("Tree", value))
        else:
            tree[name] = copy.deepcopy(cast(Any, value))
    return tree


def _respelled(tree: Any, words: Wording, error: ErrorDetails, texts: Mapping[str, str]) -> bool:
    """Converts the value of an error between text and number or boolean; returns False if that is impossible."""
    steps, _ = words.walk(error["loc"])
    value = error["input"]
    kind = error["type"]
    respelled: Any = None
    if kind in ("int_type", "float_type") and isinstance(value, str):
        with suppress(ValueError):
            respelled = int(value) if kind == "int_type" else float(value)
    elif kind == "bool_type" and isinstance(value, int | str):
        respelled = _WORDS.get(str(value).lower())
    elif kind == "string_type" and isinstance(value, int | float):
        respelled = texts.get(words.key(steps))
    if respelled is None:
        return False
    parent = tree
    for step in steps[:-1]:
        parent = parent[step]
    parent[steps[-1]] = respelled
    return True
