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
