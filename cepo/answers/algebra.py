"""Algebra: math-verify reads it, and two expressions are equal if their values are at three points."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any
from zlib import crc32

import sympy  # pyright: ignore[reportMissingTypeStubs]
from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingTypeStubs]
from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingTypeStubs]
from sympy.core.relational import Relational  # pyright: ignore[reportMissingTypeStubs]
from sympy.logic.boolalg import Boolean  # pyright: ignore[reportMissingTypeStubs]

from cepo.answers.exact_numbers import Real, from_digits

for _name in ("math_verify.parser", "math_verify.grader"):  # each call warns that its timeout is disabled
    logging.getLogger(_name).setLevel(logging.ERROR)

LONGEST_EXPRESSION = 200
"""The number of characters up to which an expression is computed or compared as algebra."""

_CONFIG = LatexExtractionConfig(
    boxed_match_priority=0,
    # Units have been read by now: math-verify would take letters such as g, h, m and s for units.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all"
    ),
)
_POINTS = 3
_LEAST_POINTS = 2
"""At how many points two expressions are equal if they have no real value at the others."""
_DIGITS = 30
_DIGITS_OF_CONSTANTS = 1_000
_TOLERANCE = sympy.Float("1e-12", 15)


@lru_cache(maxsize=4096)
def constant_value(text: str) -> Real | None:
    """Returns the value of a text in normal form if it is an expression without variables and real, else None."""
    expression = _expression(text)
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = expression.evalf(_DIGITS_OF_CONSTANTS)  # pyright: ignore[reportUnknownMemberType]
    is_real = value.is_real and value.is_number and value.is_finite
    return from_digits(str(value)) if is_real else None


@lru_cache(maxsize=4096)
def same_algebra(prediction: str, gold: str) -> bool:
    """Returns whether two texts in normal form state equal expressions, relations or sets."""
    first = _expression(prediction)
    second = _expression(gold)
    if first is None or second is None:
        return False
    are_expressions = [isinstance(side, sympy.Expr) for side in (first, second)]
    are_relations = [isinstance(side, Relational | Boolean) for side in (first, second)]
    if all(are_expressions):
        verdict = _same_values(first, second)
        if verdict is not None:
            return verdict
    if any(are_expressions) and any(are_relations):
        return False  # math-verify would compare the right side of the relation
    return bool(verify(_parsed(gold), _parsed(prediction), timeout_seconds=None, allow_set_relation_comp=True))


def _same_values(first: Any, second: Any) -> bool | None:
    """Returns whether two expressions have equal values at the points; None if they have too few values there."""
    verdicts = [_equal_at(first, second, number) for number in range(_POINTS)]
    if False in verdicts:
        return False
    if verdicts.count(True) >= _LEAST_POINTS:
        return True
    is_constant = not first.free_symbols and not second.free_symbols
    return False if is_constant else None  # two constants without a finite value are not equal


@lru_cache(maxsize=4096)
def same_equation(prediction: str, gold: str) -> bool:
    """Returns whether two equations say the same: their differences of left and right have a constant quotient."""
    quotients: list[Any] = []
    for number in range(_POINTS):
        predicted_difference = _difference_at(prediction, number)
        difference = _difference_at(gold, number)
        if predicted_difference is None or not difference:
            return False
        quotients.append(predicted_difference / difference)
    quotient = quotients[0]
    return bool(quotient) and all(
        abs(other_quotient - quotient) <= _TOLERANCE * abs(quotient) for other_quotient in quotients
    )


def _difference_at(equation: str, number: int) -> Any:
    """Returns the left less the right side of an equation at a point, or None if it has no finite value there."""
    sides = [_expression(side) for side in equation.split("=")]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return None
    return _value_at(sides[0] - sides[1], number)


def _expression(text: str) -> Any:
    """Returns the first reading of a text as a sympy object, or None if it has none."""
    readings = _parsed(text)
    return None if not readings or isinstance(readings[0], str) else readings[0]


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """Returns what math-verify reads: sympy objects, and the text itself as a string."""
    if ":" in text or is_too_costly(text):  # math-verify would read a part of a ratio
        return []
    text = text.replace("%", "/100")
    # The box makes math-verify read the whole text: it would read a bare `5 \sqrt { 3 }` as 3.
    return parse(rf"\boxed{{{text}}}", extraction_config=[_CONFIG], parsing_timeout=None)  # type: ignore[arg-type]


def _equal_at(first: Any, second: Any, number: int) -> bool | None:
    """Returns whether two expressions have equal values at a point, or None if that cannot be told there.

    It cannot if one of them has no finite value, or if they have different values that are not real. Variables have
    values that depend on their names; every other point has negative ones.
    """
    first_value = _value_at(first, number)
    second_value = _value_at(second, number)
    if first_value is None or second_value is None:
        return None
    if abs(first_value - second_value) <= _TOLERANCE * max(abs(first_value), abs(second_value)):
        return True
    has_symbols = bool(first.free_symbols | second.free_symbols)
    are_real = first_value.is_real and second_value.is_real
    if has_symbols and not are_real:
        return None  # log x + log y and log xy are equal where they are real
    return False


def _value_at(expression: Any, number: int) -> Any:
    """Returns the value of an expression at a point, or None if it is not finite."""
    point: dict[Any, Any] = {}
    for symbol in expression.free_symbols:
        point[symbol] = _coordinate(str(symbol), number)
    value = expression.subs(point).evalf(_DIGITS)
    return value if value.is_number and value.is_finite else None


def _coordinate(name: str, number: int) -> Any:
    """Returns a variable's value at a point, between 0.5 and 1.5 in magnitude."""
    hashed = crc32(f"{number}{name}".encode()) % 1009 + 505
    # Not a fraction: sympy would factor its powers' bases, which may take minutes.
    magnitude = sympy.Float(hashed, 2 * _DIGITS) / 1009
    return -magnitude if number % 2 else magnitude


_DEEPEST_NESTING = 8
_MOST_SEPARATORS = 16
_DEPTH_CHANGES = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_SEPARATOR = re.compile(r"[,;|&]")
_NEVER_READ = re.compile(r"!|\\(?:begin|i+nt|oint|sum|prod|lim|binom|exp)(?![A-Za-z])")
_LARGE_POWER = re.compile(
    r"[)\]}]\s*\^\s*[{(]?\s*-?\d{3}"  # (x+1)^{100}
    r"|\^\s*[{(]?\s*-?\d{5}"  # 2^{10000}
    r"|\^\s*[{(](?=[^{}()]*\^)[^})]*(?:[4-9]|\d\d)"  # 9^{9^9}
    r"|\^\s*(?:\d+|[A-Za-z])\s*\^"  # 9^9^9
)


def is_nested_too_deep(text: str) -> bool:
    """Returns whether brackets are nested more than 8 deep."""
    depth = 0
    for character in text:
        depth += _DEPTH_CHANGES.get(character, 0)
        if depth > _DEEPEST_NESTING:
            return True
    return False


def is_too_costly(text: str) -> bool:
    """Returns whether math-verify might take minutes to read or to compare a text, or misread it.

    These texts have more than 200 characters, brackets nested more than 8 deep, more than 16 separators, factorials,
    exponential functions, integrals, sums, limits, matrices, or a large power: an exponent of five digits, of three behind
    brackets, or with a power of its own and a number above 3 (`9^{9^9}`).
    """
    if len(text) > LONGEST_EXPRESSION or is_nested_too_deep(text):
        return True
    if len(_SEPARATOR.findall(text)) > _MOST_SEPARATORS or _NEVER_READ.search(text):
        return True
    return _LARGE_POWER.search(text) is not None
