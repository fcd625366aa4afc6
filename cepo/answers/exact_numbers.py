"""Computes with real numbers to 1,000 digits, which is more than an answer of 512 characters can show.

Each function raises `ValueError` or `ZeroDivisionError` where the result is no real number, or too large to be computed.
"""

from __future__ import annotations

import math
from typing import Any

from mpmath.ctx_mp import MPContext  # pyright: ignore[reportMissingTypeStubs]

Real = Any
"""A floating-point number of 1,000 digits whose exponent is unbounded."""

_CONTEXT: Any = MPContext()
_CONTEXT.dps = 1_000
_EQUAL: Any = _CONTEXT.mpf(10) ** -980
"""The relative difference up to which two numbers are equal."""
_NOISE: Any = _CONTEXT.mpf(10) ** -990
"""The part of a sum's terms up to which the sum is what rounding has left of 0."""
_LARGEST_EXPONENT = 10**12
_LARGEST_FACTORIAL = 9_999
NO_NUMBER = "the nodes state no real number"

PI: Real = +_CONTEXT.pi
E: Real = +_CONTEXT.e


def real(digits: str | int) -> Real:
    """Returns the value of a decimal."""
    return _CONTEXT.mpf(digits)


def from_digits(digits: str) -> Real:
    """Returns the value of a decimal that was computed, which is 0 if it is as small as what rounding leaves of 0."""
    value = real(digits)
    return real(0) if abs(value) <= _NOISE else value


def as_float(value: Real) -> float | None:
    """Returns a value as a float, or None if it is too large for one."""
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def twelve_digits(value: Real) -> str:
    """Returns a value's spelling to 12 significant digits, equal for equal values."""
    return str(_CONTEXT.nstr(value, 12)).removesuffix(".0")


def same_value(first: Real, second: Real) -> bool:
    """Returns whether two values are equal to 980 significant digits."""
    return near(first, second, _EQUAL)


def near(first: Real, second: Real, relative: Any) -> bool:
    """Returns whether two values differ by at most a part of the larger one."""
    return bool(abs(first - second) <= relative * max(abs(first), abs(second)))


def added(first: Real, second: Real) -> Real:
    """Returns the sum of two values, which is 0 for `sqrt(2) - sqrt(2)`."""
    total = first + second
    is_noise = abs(total) <= _NOISE * max(abs(first), abs(second))
    return real(0) if is_noise else total


def power(base: Real, exponent: Real) -> Real:
    """Returns a power; one of a negative base exists if the exponent is an integer."""
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(NO_NUMBER)
    if base < 0 and not _is_integer(exponent):
        raise ValueError(NO_NUMBER)
    return base ** (int(exponent) if _is_integer(exponent) else exponent)


def root(value: Real, degree: Real) -> Real:
    """Returns the real root of a value, which of a negative one exists if the degree is odd."""
    if degree == 0:
        raise ValueError(NO_NUMBER)
    is_odd = _is_integer(degree) and degree % 2 == 1
    if value < 0 and is_odd:
        return -power(-value, 1 / degree)
    return power(value, 1 / degree)


def _is_integer(value: Real) -> bool:
    return bool(_CONTEXT.isint(value))


def factorial(value: Real) -> Real:
    """Returns the factorial of an integer from 0 to 9999."""
    if not _is_integer(value) or not 0 <= value <= _LARGEST_FACTORIAL:
        raise ValueError(NO_NUMBER)
    return real(math.factorial(int(value)))


def binomial(total: Real, chosen: Real) -> Real:
    """Returns the number of ways to choose from a total of at most 9999."""
    if not _is_integer(total) or not _is_integer(chosen):
        raise ValueError(NO_NUMBER)
    if not 0 <= chosen <= total <= _LARGEST_FACTORIAL:
        raise ValueError(NO_NUMBER)
    return real(math.comb(int(total), int(chosen)))
