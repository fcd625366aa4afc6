"""Declares sections of settings and reads them; errors name the key, its value and the accepted values."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_core.core_schema import CoreSchema

from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import Fields, Tree

_Section = TypeVar("_Section")
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Literal[-1] | Count
"""A count of at least 1; -1 turns the setting off."""
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_PLAIN_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text"}
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
_WRONG_LENGTH = ("too_short", "too_long")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field, dataclasses.field))
def section(declared: type[_Section]) -> type[_Section]:
    """Turns a class into a section of settings: a frozen pydantic dataclass that checks every new instance.

    Types are strict (3.0 is not an integer, true is not a number), numbers must be finite, and unknown keys are
    refused. The text below a setting, or `Field(description=...)`, is its description.
    """

    def read_from_mapping(cls: type[_Section], source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = inner = cast("Tree", handler(source))
        while inner["type"] != "dataclass":  # validators of the whole section wrap it
            inner = inner["schema"]
        inner["strict"] = False  # a strict section would accept only instances
        return cast("CoreSchema", schema)

    for name, text in _texts_below_settings(declared).items():
        default = vars(declared).get(name, PydanticUndefined)
        setattr(declared, name, Field(default=default, description=" ".join(text.split())))
    setattr(declared, "__get_pydantic_core_schema__", classmethod(read_from_mapping))  # noqa: B010
    frozen = not dataclasses.is_dataclass(declared) or cast(Any, declared).__dataclass_params__.frozen
    return cast("type[_Section]", pydantic_dataclass(frozen=frozen, kw_only=True, config=_RULES)(declared))


def _texts_below_settings(declared: type[Any]) -> dict[str, str]:
    """Returns the strings that follow the settings of a class in its source, as pydantic reads them without inheritance."""
    node = _classes_of(declared.__module__).get(declared.__qualname__)
    return {
        setting.target.id: str(below.value.value)
        for setting, below in pairwise(node.body if node else list[ast.stmt]())
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Returns the classes of a module by their qualified names; none of what was typed into an interpreter."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    outer = {f"{node.name}.": node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    bodies = {"": tree.body} | outer
    return {f"{name}{node.name}": node for name in bodies for node in bodies[name] if isinstance(node, ast.ClassDef)}


def fields_of(kind: type[Any]) -> Mapping[str, FieldInfo]:
    return kind.__pydantic_fields__


@dataclass(frozen=True)
class Decisive:
    """Marks, within `Annotated`, whether a setting decides what is trained; a section's mark holds for its settings."""

    value: bool


DECISIVE, NOT_DECISIVE = Decisive(True), Decisive(False)


def is_decisive(kind: type[Any], key: str) -> bool:
    """Returns whether the section `kind` marks the dotted `key` as decisive; without any mark it is."""
    found = True
    for name in key.split("."):
        if not is_pydantic_dataclass(kind) or name not in fields_of(kind):  # a mapping's entry has the mapping's mark
            break
        field = fields_of(kind)[name]
        found = next((mark.value for mark in field.metadata if isinstance(mark, Decisive)), found)
        kind = cast("type[Any]", field.annotation)
    return found


class Fault(NamedTuple):
    """An error in one key. `rank` orders errors: unknown keys, then values, then missing settings."""

    rank: int
    key: str
    message: str


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
    elsewhere: Sequence[str] = (),
) -> _Section:
    """Reads the section `kind` from a mapping. Missing keys keep their defaults, also inside nested sections.

    Text that spells a number or a boolean is converted, as are 0 and 1 for a boolean. Where text is expected, a number
    is replaced by its entry in `texts`, the original text of values that YAML read as numbers, by dotted key. No other value
    changes its type. `path` is the dotted key of the section itself; the dotted keys `elsewhere` may be suggested in place
    of an unknown one. Raises `SectionError` for an unknown key, a wrong type, a value out of bounds, or a missing setting.
    """
    adapter = TypeAdapter(kind)
    given = merged_trees(default_tree(kind), cast("Tree", tree)) if isinstance(tree, Mapping) else tree
    try:
        return adapter.validate_python(given)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    words = Wording(adapter.json_schema(), path, elsewhere)
    if sum(_respelled(given, words, error, texts or {}) for error in errors):
        return read_section(kind, given, path=path, texts=texts, elsewhere=elsewhere)
    raise SectionError(words.faults(errors))


def default_tree(kind: type[Any]) -> Tree:
    """Returns the defaults of a section as a plain tree, without the settings that have no default."""
    tree: Tree = {}
    for name, field in fields_of(kind).items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(field.annotation, type) and is_pydantic_dataclass(field.annotation):
            tree[name] = default_tree(field.annotation) if default is None else dataclasses.asdict(default)
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
    value, kind = error["input"], error["type"]
    spelled: Any = None
    if kind in ("int_type", "float_type") and isinstance(value, str):
        with suppress(ValueError):
            spelled = int(value) if kind == "int_type" else float(value)
    elif kind == "bool_type" and isinstance(value, int | str):
        spelled = _WORDS.get(str(value).lower())
    elif kind == "string_type" and isinstance(value, int | float):
        spelled = texts.get(words.key(steps))
    if spelled is None:
        return False
    for step in steps[:-1]:
        tree = tree[step]
    tree[steps[-1]] = spelled
    return True


class Wording:
    """Writes the error messages about the values of one section, based on its JSON schema."""

    def __init__(self, schema: Tree, path: str, elsewhere: Sequence[str]) -> None:
        self._schema, self._path, self._elsewhere = schema, path, elsewhere

    def walk(self, location: Sequence[int | str]) -> tuple[list[int | str], Tree]:
        """Returns the key in pydantic's location, without the union branch that may follow, and the key's schema."""
        node, steps = resolved(self._schema, self._schema), list[int | str]()
        for step in location:
            inside = _main(node)
            below = inside.get("items") if isinstance(step, int) else inside.get("properties", {}).get(step)
            if below is None:
                break
            node = resolved(below, self._schema)
            steps.append(step)
        return steps, node

    def key(self, steps: Sequence[int | str]) -> str:
        """Returns the dotted key, such as `a.b[0]`, with the path of the section in front."""
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        return f"{self._path}{dotted}" if self._path else dotted.removeprefix(".")

    def faults(self, errors: Sequence[ErrorDetails]) -> list[Fault]:
        """Returns one fault for each key: a broken bound is more informative than another branch's type error."""
        bounds_last = sorted(errors, key=lambda error: error["type"] in _OUT_OF_BOUNDS)
        found = {fault.key: fault for fault in map(self._fault, bounds_last)}
        return sorted(found.values(), key=lambda fault: fault.rank)

    def _fault(self, error: ErrorDetails) -> Fault:
        kind, value = error["type"], error["input"]
        steps, node = self.walk(error["loc"])
        key = self.key(steps)
        if kind in _UNKNOWN:
            name = str(error["loc"][len(steps)])
            return Fault(0, self.key([*steps, name]), self._unknown(name, key, node))
        if kind in ("missing", "missing_argument"):
            return Fault(2, key, f"{key} is required and not set. {node.get('description', '')}".strip())
        if kind in ("value_error", "assertion_error"):
            message = f"{key}: {error.get('ctx', {}).get('error', error['msg'])}"
        elif kind in ("dataclass_type", "dataclass_exact_type", "model_type"):
            message = f"{key} must be a section with keys, got {shown(value)}."
        elif kind in _WRONG_LENGTH:
            message = f"{key} must have {_main(node).get('minItems')} entries, got {len(value)}: {value}."
        elif kind in _OUT_OF_BOUNDS:
            message = f"{key} must be {accepted_range(node) or 'a finite number'}, got {shown(value)}."
        else:
            near = did_you_mean(str(value), map(str, _main(node).get("enum", ())))
            quote = " Write it in quotes." if kind == "string_type" and isinstance(value, int | float) else ""
            message = f"{key} must be {accepted_type(node)}, got {shown(value)}.{near}{quote}"
        return Fault(1, key, message)

    def _unknown(self, name: str, around: str, node: Tree) -> str:
        known, path = list(_main(node).get("properties", {})), f"{around}." if around else ""
        beside = {key.removeprefix(path).partition(".")[0] for key in self._elsewhere if key.startswith(path)}
        near = did_you_mean(name, [*known, *sorted(beside - set(known))])
        dotted = [self.key([]) + key for key, _ in leaves_of(self._schema)] if not self._path else []
        same_name = [key for key in [*dotted, *self._elsewhere] if key.rpartition(".")[2] == name]
        if same_name:
            near = f" Did you mean '{same_name[0]}'?"
        where = f"under '{around}'" if around else "at the top"
        return f"unknown key '{path}{name}'.{near} Known {where}: {', '.join(known) or '(none)'}."


def leaves_of(schema: Tree, node: Tree | None = None, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the dotted key and schema of every setting. A mapping whose entries have no defaults is one setting."""
    around = resolved(node or schema, schema)
    for name, below in around.get("properties", {}).items():
        inner = resolved(below, schema)
        entries = inner.get("properties", {}).values()
        if "properties" in inner and ("required" in inner or any({"default", "$ref"} & set(each) for each in entries)):
            yield from leaves_of(schema, inner, f"{path}{name}.")
        elif "properties" not in inner or entries:
            yield f"{path}{name}", inner


def resolved(node: Tree, schema: Tree) -> Tree:
    """Returns the schema that a `$ref` names, updated by the other entries of `node`."""
    if "$ref" not in node:
        return node
    target = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _main(node: Tree) -> Tree:
    """Returns the main alternative of a setting: neither null nor a number that turns it off."""
    branches = [branch for branch in node.get("anyOf", ()) if branch.get("type") != "null" and "const" not in branch]
    return branches[0] if branches else node


def accepted_type(node: Tree) -> str:
    """Describes the type that a schema accepts, without its bounds."""
    main = _main(node)
    if "enum" in main:
        words = f"one of {', '.join(map(str, main['enum']))}"
    elif main.get("type") == "array":
        words = f"a list, each entry {accepted_type(main['items'])}"
    else:
        words = _PLAIN_TYPES.get(main.get("type", ""), "a mapping of keys to values")
    return f"{words} or null" if {"type": "null"} in node.get("anyOf", ()) else words


def accepted_range(node: Tree) -> str:
    """Describes the bounds of a number, or of each number of a list; empty if there are none."""
    main = _main(node)
    if main.get("type") == "array":
        return accepted_range(main["items"])
    text = " and ".join(f"{words} {main[bound]:g}" for bound, words in _BOUNDS.items() if bound in main)
    off = [f"{branch['const']} (off) or " for branch in node.get("anyOf", ()) if "const" in branch]
    return "".join(off) + text


def shown(value: Any) -> str:
    """Formats a value for an error message, with its type if the bare value could mislead."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print thousands of digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, cast('Tree', value))) or '(none)'}"
    return f"the list {value!r}" if isinstance(value, list) else repr(value)
