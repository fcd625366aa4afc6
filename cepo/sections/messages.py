"""Words the errors of settings and what a setting accepts, from a section's JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic_core import ErrorDetails

from cepo.errors import did_you_mean
from cepo.files.trees import Tree

_PLAIN_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
_NUMBER_AND_UNIT = re.compile(r"[\d.]+ ?[A-Za-z%]+")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_WORDED = ("value_error", "assertion_error", "too_short", "too_long")
"""The kinds whose message by pydantic, or by our own validator, says enough."""


class Fault(NamedTuple):
    """An error in one key. `rank` orders errors: unknown keys, then values, then missing settings."""

    rank: int
    key: str
    message: str


class Wording:
    """Writes the error messages about the values of one section, based on its JSON schema."""

    def __init__(self, schema: Tree, path: str) -> None:
        self._schema = schema
        self._path = path

    def walk(self, location: Sequence[int | str]) -> tuple[list[int | str], Tree]:
        """Returns the key in pydantic's location, without the union branch that may follow, and the key's schema."""
        node = resolved(self._schema, self._schema)
        steps: list[int | str] = []
        for step in location:
            main = _main(node)
            next_node = main.get("items") if isinstance(step, int) else main.get("properties", {}).get(step)
            if next_node is None:
                break
            node = resolved(next_node, self._schema)
            steps.append(step)
        return steps, node

    def key(self, steps: Sequence[int | str]) -> str:
        """Returns the dotted key, such as `a.b[0]`, with the path of the section in front."""
        parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps]
        dotted = "".join(parts)
        return f"{self._path}{dotted}" if self._path else dotted.removeprefix(".")

    def faults(self, errors: Sequence[ErrorDetails]) -> list[Fault]:
        """Returns one fault for each key: a broken bound is more informative than another branch's type error."""
        bounds_last = sorted(errors, key=lambda error: error["type"] in _OUT_OF_BOUNDS)
        faults: dict[str, Fault] = {}
        for error in bounds_last:
            fault = self._fault(error)
            faults[fault.key] = fault
        return sorted(faults.values(), key=lambda fault: fault.rank)

    def _fault(self, error: ErrorDetails) -> Fault:
        kind = error["type"]
        value = error["input"]
        steps, node = self.walk(error["loc"])
        key = self.key(steps)
        if kind in _UNKNOWN:
            name = str(error["loc"][len(steps)])
            return Fault(0, self.key([*steps, name]), self._unknown(name, key, node))
        if kind in ("missing", "missing_argument"):
            return Fault(2, key, f"{key} is required and not set. {node.get('description', '')}".strip())
        if kind in _WORDED:
            message = f"{key}: {error.get('ctx', {}).get('error', error['msg'])}"
        elif kind in _OUT_OF_BOUNDS:
            message = f"{key} must be {accepted_range(node) or 'a finite number'}, got {shown(value)}."
        else:
            accepted_values = [str(accepted) for accepted in _main(node).get("enum", ())]
            suggestion = did_you_mean(str(value), accepted_values) or _remedy(key, value, node)
            message = f"{key} must be {accepted_type(node)}, got {shown(value)}.{suggestion}"
        return Fault(1, key, message)

    def _unknown(self, name: str, around: str, node: Tree) -> str:
        known = list(_main(node).get("properties", {}))
        path = f"{around}." if around else ""
        where = f"under '{around}'" if around else "at the top"
        listed = ", ".join(known) or "(none)"
        return f"unknown key '{path}{name}'.{did_you_mean(name, known)} Known {where}: {listed}."


def _remedy(key: str, value: object, node: Tree) -> str:
    """Returns a sentence fragment with what to write in place of a text; empty if that cannot be told."""
    kind = _main(node).get("type")
    if not isinstance(value, str):
        return ""
    if kind == "array":
        return f" Write [{','.join(value.replace(',', ' ').split())}]."
    if kind in ("integer", "number") and _NUMBER_AND_UNIT.fullmatch(value):
        return f" Write the number alone, in the unit that cepo help {key} names."
    if kind == "number" and _DECIMAL_COMMA.fullmatch(value):
        return f" Write {value.replace(',', '.')}."
    return ""


def leaves_of(schema: Tree, node: Tree | None = None, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the dotted key and schema of every setting. A mapping whose entries have no defaults is one setting."""
    section = resolved(node or schema, schema)
    for name, reference in section.get("properties", {}).items():
        key = f"{path}{name}"
        inner = resolved(reference, schema)
        if "properties" not in inner:
            yield key, inner
            continue
        entries = inner["properties"].values()
        have_defaults = any("default" in entry or "$ref" in entry for entry in entries)
        if have_defaults or "required" in inner:
            yield from leaves_of(schema, inner, f"{key}.")
        elif entries:
            yield key, inner


def resolved(node: Tree, schema: Tree) -> Tree:
    """Returns the schema that a `$ref` names, updated by the other entries of `node`."""
    if "$ref" not in node:
        return node
    _, _, name = node["$ref"].rpartition("/")
    other_entries = {key: value for key, value in node.items() if key != "$ref"}
    return {**schema["$defs"][name], **other_entries}


def _main(node: Tree) -> Tree:
    """Returns the main alternative of a setting: neither null nor a single value."""
    for branch in node.get("anyOf", ()):
        if branch.get("type") != "null" and "const" not in branch:
            return branch
    return node


def accepted_type(node: Tree) -> str:
    """Describes the type that a schema accepts, without its bounds."""
    main = _main(node)
    if "enum" in main:
        choices = ", ".join(map(str, main["enum"]))
        words = f"one of {choices}"
    elif main.get("type") == "array":
        entry = accepted_type(main["items"])
        words = f"a list, each entry {entry}"
    else:
        words = _PLAIN_TYPES.get(main.get("type", ""), "a mapping of keys to values")
    for word in _constants(node, str):
        words += f", or {word}"
    accepts_null = {"type": "null"} in node.get("anyOf", ())
    return f"{words} or null" if accepts_null else words


def accepted_range(node: Tree) -> str:
    """Describes the bounds of a number, or of each number of a list; empty if there are none."""
    main = _main(node)
    if main.get("type") == "array":
        return accepted_range(main["items"])
    bounds: list[str] = []
    for bound, words in _BOUNDS.items():
        if bound in main:
            bounds.append(f"{words} {main[bound]:g}")
    return " or ".join([*_constants(node, int), " and ".join(bounds)])


def _constants(node: Tree, kind: type[str] | type[int]) -> list[str]:
    """Returns the single values of a kind that a setting accepts beside its main alternative, such as -1 or auto."""
    return [str(branch["const"]) for branch in node.get("anyOf", ()) if isinstance(branch.get("const"), kind)]


def shown(value: object) -> str:
    """Formats a value for an error message, a text with its type."""
    return f"the text {value!r}" if isinstance(value, str) else written(value)


def written(value: object) -> str:
    """Formats a value as a command line has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
