"""Declares sections of settings: dataclasses whose fields have bounds, descriptions and marks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_core.core_schema import CoreSchema

from cepo.files.trees import Tree

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


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field, dataclasses.field))
def section(declared: type[_Section]) -> type[_Section]:
    """Turns a class into a section of settings: a frozen pydantic dataclass that checks every new instance.

    Types are strict (3.0 is not an integer, true is not a number), numbers must be finite, and unknown keys are
    refused. The text below a setting, or `Field(description=...)`, is its description.
    """

    def read_from_mapping(cls: type[_Section], source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        section_schema = cast("Tree", schema)
        while section_schema["type"] != "dataclass":  # validators of the whole section wrap it
            section_schema = section_schema["schema"]
        section_schema["strict"] = False  # a strict section would accept only instances
        return schema

    for name, text in _texts_below_settings(declared).items():
        _describe(declared, name, " ".join(text.split()))
    setattr(declared, "__get_pydantic_core_schema__", classmethod(read_from_mapping))  # noqa: B010
    is_frozen = True
    if dataclasses.is_dataclass(declared):  # it inherits from one, whose choice a dataclass must repeat
        is_frozen = cast(Any, declared).__dataclass_params__.frozen
    as_dataclass = pydantic_dataclass(frozen=is_frozen, kw_only=True, config=_RULES)
    return cast("type[_Section]", as_dataclass(declared))


def _describe(declared: type[Any], name: str, text: str) -> None:
    """Gives a setting the description `text`, and leaves its default: a value, or a field with bounds and a description."""
    default = vars(declared).get(name, PydanticUndefined)
    if isinstance(default, FieldInfo | dataclasses.Field):
        annotation = declared.__annotations__[name]
        declared.__annotations__[name] = Annotated[annotation, Field(description=text)]
        return
    setattr(declared, name, Field(default=default, description=text))


def _texts_below_settings(declared: type[Any]) -> dict[str, str]:
    """Returns the strings that follow the settings of a class in its source, as pydantic reads them without inheritance."""
    node = _classes_of(declared.__module__).get(declared.__qualname__)
    texts: dict[str, str] = {}
    if node is None:
        return texts
    for statement, next_statement in pairwise(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            texts[statement.target.id] = str(next_statement.value.value)
    return texts


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Returns the classes of a module by their qualified names; none of what was typed into an interpreter."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    classes: dict[str, ast.ClassDef] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        classes[node.name] = node
        for inner in node.body:
            if isinstance(inner, ast.ClassDef):
                classes[f"{node.name}.{inner.name}"] = inner
    return classes


def fields_of(kind: type[Any]) -> Mapping[str, FieldInfo]:
    return kind.__pydantic_fields__


@dataclass(frozen=True)
class Mark:
    """Marks, within `Annotated`, whether a setting has a property; a section's mark holds for its settings."""

    name: Literal["decisive", "from_record"]
    value: bool


DECISIVE = Mark("decisive", True)
NOT_DECISIVE = Mark("decisive", False)
"""Whether a setting decides what is trained."""
FROM_RECORD = Mark("from_record", True)
NOT_FROM_RECORD = Mark("from_record", False)
"""Whether the record of a stranger's run may decide a setting."""


@dataclass(frozen=True)
class EffectiveIf:
    """Marks, within `Annotated`, a setting without effect unless the setting `name` of its section has the value `value`."""

    name: str
    value: bool


def condition_of(kind: type[Any], key: str) -> EffectiveIf | None:
    """Returns on what the effect of the setting `key` of the section `kind` depends; None if it is not marked."""
    field = fields_of(kind).get(key)
    marks = [] if field is None else field.metadata
    return next((mark for mark in marks if isinstance(mark, EffectiveIf)), None)


def is_decisive(kind: type[Any], key: str) -> bool:
    """Returns whether the section `kind` marks the dotted `key` as decisive; without any mark it is."""
    return _mark_of(kind, key, "decisive", unmarked=True)


def may_come_from_record(kind: type[Any], key: str) -> bool:
    """Returns whether the section `kind` lets the record of a stranger's run decide the dotted `key`; without a mark not."""
    return _mark_of(kind, key, "from_record", unmarked=False)


def _mark_of(kind: type[Any], key: str, mark: str, *, unmarked: bool) -> bool:
    """Returns the value of the innermost mark of a kind on the way to a setting."""
    marked = unmarked
    for name in key.split("."):
        if not is_pydantic_dataclass(kind) or name not in fields_of(kind):  # a mapping's entry has the mapping's mark
            break
        field = fields_of(kind)[name]
        for entry in field.metadata:
            if isinstance(entry, Mark) and entry.name == mark:
                marked = entry.value
        kind = cast("type[Any]", field.annotation)
    return marked
