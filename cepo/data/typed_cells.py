"""Converts cells of Parquet and Arrow columns to Python values by the columns' own types and the file's metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy

from cepo.data.arrow import pyarrow
from cepo.data.json_text import read_value
from cepo.errors import DataError
from cepo.files.trees import Tree, is_dict, is_list

Refine = Callable[[Any], Any]
"""Changes a value as pyarrow gives it to what a row has; never called with None."""

_DEEPEST_TYPE = 50
_PANDAS_INDEX = "__index_level_"


def column_names(schema: Any) -> list[str]:
    """Returns the names of a table's columns, without the unnamed row numbers that pandas writes.

    Raises `DataError` for a name that two columns have.
    """
    names = [name for name in schema.names if not name.startswith(_PANDAS_INDEX)]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DataError(f"two columns are named {double!r:.100}")
    return names


def features_of(schema: Any) -> Tree:
    """Returns what the `datasets` library wrote about the columns of a file: names of classes, for example.

    Metadata that do not have its form count as none.
    """
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if is_dict(features) else {}


def refiner(kind: Any, feature: object = None, depth: int = 0) -> Refine | None:
    """Returns how values of an Arrow type are changed, or None if they are not.

    - NaN becomes None, an empty cell. A number of 16 or 32 bits becomes the one with its shortest digits: 34.6, not
      34.599998474121094.
    - A class becomes its name, and JSON in a column of texts the value that it describes.

    `feature` is the description of the column by the `datasets` library. Raises `DataError` for types nested too deeply.
    """
    if depth > _DEEPEST_TYPE:
        raise DataError(f"a column's type is nested too deeply; accepted: at most {_DEEPEST_TYPE} levels")
    described = feature if is_dict(feature) else {}
    label = described.get("_type")
    if label == "ClassLabel" and is_list(described.get("names")) and pyarrow.types.is_integer(kind):
        return _class_namer(described["names"])
    if label == "Json" or (isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json"):
        return lambda text: read_value(text) if isinstance(text, str) else text
    if pyarrow.types.is_floating(kind):
        return _refiner_of_floats(kind.bit_width)
    if pyarrow.types.is_dictionary(kind):
        return refiner(kind.value_type, feature, depth + 1)
    if pyarrow.types.is_map(kind):
        return _for_values(refiner(kind.item_type, None, depth + 1))
    if hasattr(kind, "value_field"):  # all kinds of lists
        first_feature = feature[0] if is_list(feature) and feature else None
        inner = described.get("feature", first_feature)
        return _for_each(refiner(kind.value_type, inner, depth + 1))
    if pyarrow.types.is_struct(kind):
        return _for_fields(kind, described, depth)
    return None


def _refiner_of_floats(bit_width: int) -> Refine:
    if bit_width == 16:
        return _shortest(numpy.float16)
    if bit_width == 32:
        return _shortest(numpy.float32)
    return _or_none


def _class_namer(names: Sequence[object]) -> Refine:
    def name_of(number: int) -> str | None:
        if number == -1:  # as the datasets library writes a missing class
            return None
        if not 0 <= number < len(names):
            raise DataError(f"has the class {number} of {len(names)}")
        return str(names[number])

    return name_of


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _shortest(kind: type) -> Refine:
    """Returns how a number is changed to that with the shortest digits which `kind` reads as the same number."""

    def shortest(number: float) -> float | None:
        return None if math.isnan(number) else float(str(kind(number)))

    return shortest


def _for_each(refine: Refine | None) -> Refine | None:
    if refine is None:
        return None
    return lambda values: [None if value is None else refine(value) for value in values]


def _for_values(refine: Refine | None) -> Refine | None:
    if refine is None:
        return None
    return lambda entries: {name: None if value is None else refine(value) for name, value in entries.items()}


def _for_fields(kind: Any, described: Tree, depth: int) -> Refine | None:
    """Returns how structs are changed. `datasets` describes a list of structs that it stores as a struct of lists too."""
    inner = described.get("feature") if is_dict(described.get("feature")) else described
    refiners: dict[str, Refine] = {}
    for number in range(kind.num_fields):
        field = kind.field(number)
        feature = cast("Tree", inner).get(field.name)
        if inner is not described:
            feature = {"feature": feature, "_type": "List"}
        refine = refiner(field.type, feature, depth + 1)
        if refine is not None:
            refiners[field.name] = refine
    if not refiners:
        return None

    def refined(struct: Tree) -> Tree:
        changed = dict(struct)
        for name, refine in refiners.items():
            if struct[name] is not None:
                changed[name] = refine(struct[name])
        return changed

    return refined
