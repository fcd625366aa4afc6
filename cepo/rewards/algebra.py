"""Compares algebra: math-verify reads it, and two expressions are equal if their values are at three points."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any
from zlib import crc32

import sympy  # pyright: ignore[reportMissingTypeStubs]
from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingTypeStubs]
from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingTypeStubs]
from sympy.core.relational import Relational  # pyright: ignore[reportMissingTypeStubs]
from sympy.logic.boolalg import Boolean  # pyright: ignore[reportMissingTypeStubs]

from cepo.rewards.magnitude import is_too_costly

for _name in ("math_verify.parser", "math_verify.grader"):  # each call warns that its timeout is disabled
    logging.getLogger(_name).setLevel(logging.ERROR)

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
_TOLERANCE = sympy.Float("1e-12", 15)


@lru_cache(maxsize=4096)
def same_algebra(prediction: str, gold: str) -> bool:
    """Returns whether two texts in normal form state equal expressions, relations or sets."""
    first = _parsed(prediction)
    second = _parsed(gold)
    if not first or not second or isinstance(first[0], str) or isinstance(second[0], str):
        return False
    are_expressions = [isinstance(parsed[0], sympy.Expr) for parsed in (first, second)]
    if all(are_expressions):
        verdicts = [_equal_at(first[0], second[0], number) for number in range(_POINTS)]
        if False in verdicts:
            return False
        if sum(verdict is True for verdict in verdicts) >= _LEAST_POINTS:
            return True
        if not (first[0].free_symbols or second[0].free_symbols):
            return False  # two numbers without a finite value
    if any(are_expressions) and any(isinstance(parsed[0], Relational | Boolean) for parsed in (first, second)):
        return False  # math-verify would compare the right side of the relation
    return bool(verify(second, first, timeout_seconds=None, allow_set_relation_comp=True))


@lru_cache(maxsize=4096)
def same_equation(prediction: str, gold: str) -> bool:
    """Returns whether two equations say the same: their differences of left and right have a constant quotient."""
    quotients: list[Any] = []
    for number in range(_POINTS):
        differences = [_difference_at(text, number) for text in (prediction, gold)]
        if differences[0] is None or not differences[1]:
            return False
        quotients.append(differences[0] / differences[1])
    first = quotients[0]
    return bool(first) and all(abs(quotient - first) <= _TOLERANCE * abs(first) for quotient in quotients)


def _difference_at(equation: str, number: int) -> Any:
    """Returns the left less the right side of an equation at a point, or None if it has no finite value there."""
    sides = [_parsed(side) for side in equation.split("=")]
    if not all(side and isinstance(side[0], sympy.Expr) for side in sides):
        return None
    return _value_at(sides[0][0] - sides[1][0], number)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    if is_too_costly(text):
        return []
    if ":" in text:
        text = _ratio_as_fraction(text)
        if not text:
            return []
    text = text.replace("%", "/100")
    # The box makes math-verify read the whole text: it would read a bare `5 \sqrt { 3 }` as 3.
    return parse(rf"\boxed{{{text}}}", extraction_config=[_CONFIG], parsing_timeout=None)  # type: ignore[arg-type]


def _ratio_as_fraction(text: str) -> str:
    r"""Returns `\frac{a}{b}` for `a:b`, and an empty text for other texts with a colon, of which math-verify reads a part."""
    sides = text.split(":")
    is_whole = all(
        side and all(side.count(left) == side.count(right) for left, right in ("()", "{}", "[]")) for side in sides
    )
    if len(sides) != 2 or not is_whole or r"\{" in text or "=" in text:
        return ""
    return rf"\frac{{{sides[0]}}}{{{sides[1]}}}"


def _equal_at(first: Any, second: Any, number: int) -> bool | None:
    """Returns whether two expressions have equal values at a point, or None if one of them has no finite, or they have different
    values that are not real.

    Variables have values that depend on their names; every other point has negative ones.
    """
    left = _value_at(first, number)
    right = _value_at(second, number)
    if left is None or right is None:
        return None
    if abs(left - right) <= _TOLERANCE * max(abs(left), abs(right)):
        return True
    has_symbols = bool(first.free_symbols or second.free_symbols)
    is_complex = any(str(symbol) == "i" for symbol in first.free_symbols | second.free_symbols)
    if has_symbols and not is_complex and not (left.is_real and right.is_real):
        return None  # log x + log y and log xy are equal where they are real
    return False


def _value_at(expression: Any, number: int) -> Any:
    point = {symbol: _coordinate(str(symbol), number) for symbol in expression.free_symbols}
    point |= {symbol: sympy.I for symbol in point if str(symbol) == "i"}  # pyright: ignore[reportUnknownMemberType]
    value = expression.subs(point).evalf(_DIGITS)
    return value if value.is_number and value.is_finite else None


def _coordinate(name: str, number: int) -> Any:
    # Not a fraction: sympy would factor its powers' bases, which may take minutes.
    share = sympy.Float(crc32(f"{number}{name}".encode()) % 1009 + 505, 2 * _DIGITS) / 1009
    return -share if number % 2 else share
