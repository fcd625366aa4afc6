"""Computes with real numbers: exactly if they are rational, else to 60 digits.

Each function raises `ValueError` or `ZeroDivisionError` where the result is no real number, or too large to be computed.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext  # pyright: ignore[reportMissingTypeStubs]

Real = Any
"""A `Fraction`, which is exact, or a floating-point number of 60 digits whose exponent is unbounded."""

_CONTEXT: Any = MPContext()
_CONTEXT.dps = 60
_EQUAL: Any = _CONTEXT.mpf(10) ** -40
"""The relative difference up to which two floating-point numbers are equal."""
_NOISE: Any = _CONTEXT.mpf(10) ** -50
"""The magnitude up to which a value is what rounding has left of 0."""
_MOST_EXACT_BITS = 40_000
"""About 12,000 digits; a larger fraction is rounded to 60 digits."""
_LARGEST_EXPONENT = 10**12
_LARGEST_NUMERATOR_OF_EXPONENT = 100
_LARGEST_FACTORIAL = 9_999
_LONGEST_ROOT_DIGITS = 400
NO_NUMBER = "the nodes state no real number"

PI: Real = +_CONTEXT.pi
E: Real = +_CONTEXT.e


def from_digits(digits: str) -> Real:
    """Returns the value of a decimal, which is 0 if it is as small as what rounding leaves of 0."""
    value = _CONTEXT.mpf(digits)
    return Fraction(0) if abs(value) <= _NOISE else value


def floating(value: Real) -> Any:
    """Returns a value as a number of 60 digits."""
    if isinstance(value, Fraction):
        return _CONTEXT.mpf(value.numerator) / value.denominator
    return value


def as_float(value: Real) -> float | None:
    """Returns a value as a float, or None if it is too large for one."""
    try:
        converted = float(floating(value))
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def twelve_digits(value: Real) -> str:
    """Returns a value's spelling to 12 significant digits, equal for equal values."""
    converted = as_float(value)
    is_underflow = converted == 0 and value != 0
    if converted is None or is_underflow:
        return str(_CONTEXT.nstr(floating(value), 12))
    return f"{converted + 0.0:.12g}"  # -0.0 + 0.0 is 0.0


def same_value(first: Real, second: Real) -> bool:
    """Returns whether two values are equal: fractions exactly, others to 40 significant digits."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    return near(first, second, _EQUAL)


def near(first: Real, second: Real, relative: Any) -> bool:
    """Returns whether two values differ by at most a part of the larger one."""
    first_float = floating(first)
    second_float = floating(second)
    return bool(abs(first_float - second_float) <= relative * max(abs(first_float), abs(second_float)))


def added(first: Real, second: Real) -> Real:
    """Returns the sum of two values."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _bounded(first + second)
    first_float = floating(first)
    second_float = floating(second)
    total = first_float + second_float
    if abs(total) <= _NOISE * max(abs(first_float), abs(second_float)):
        return Fraction(0)  # what is left of two equal roots
    return total


def multiplied(first: Real, second: Real) -> Real:
    """Returns the product of two values."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _bounded(first * second)
    return floating(first) * floating(second)


def divided(dividend: Real, divisor: Real) -> Real:
    """Returns the quotient of two values."""
    if isinstance(dividend, Fraction) and isinstance(divisor, Fraction):
        return _bounded(dividend / divisor)
    return floating(dividend) / floating(divisor)


def _bounded(value: Fraction) -> Real:
    """Returns a fraction as it is, or rounded if it has too many digits to compute with quickly."""
    return value if _bits_of(value) <= _MOST_EXACT_BITS else floating(value)


def _bits_of(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Real, exponent: Real) -> Real:
    """Returns a power, exactly if base and exponent are fractions and the result is a fraction of moderate size."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        exact = _exact_power(base, exponent)
        if exact is not None:
            return exact
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(NO_NUMBER)
    if _is_integer(exponent):
        return floating(base) ** exponent.numerator
    if base < 0:
        raise ValueError(NO_NUMBER)
    return floating(base) ** floating(exponent)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Returns a power that is a fraction of moderate size, else None."""
    if exponent.denominator == 1:
        num_bits = abs(exponent.numerator) * _bits_of(base)
        return base**exponent.numerator if num_bits <= _MOST_EXACT_BITS else None
    if base < 0 or abs(exponent.numerator) >= _LARGEST_NUMERATOR_OF_EXPONENT:
        return None
    exact_root = _exact_root(base, exponent.denominator)
    return None if exact_root is None else exact_root**exponent.numerator


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Returns the root of a fraction that is the power of a fraction, else None."""
    roots: list[int] = []
    for radicand in (value.numerator, value.denominator):
        if len(bin(radicand)) > 4 * _LONGEST_ROOT_DIGITS or degree > _LONGEST_ROOT_DIGITS:
            return None
        nearest_integer = int(_CONTEXT.nint(_CONTEXT.root(radicand, degree)))
        if nearest_integer**degree != radicand:
            return None
        roots.append(nearest_integer)
    return Fraction(roots[0], roots[1])


def root(value: Real, degree: Real) -> Real:
    """Returns the real root of a value, which of a negative one exists if the degree is odd."""
    if degree == 0:
        raise ValueError(NO_NUMBER)
    is_odd = _is_integer(degree) and degree.numerator % 2 == 1
    if value < 0 and is_odd:
        return -power(-value, 1 / degree)
    return power(value, divided(Fraction(1), degree))


def _is_integer(value: Real) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def factorial(value: Real) -> Real:
    """Returns the factorial of an integer from 0 to 9999."""
    if not _is_integer(value) or not 0 <= value <= _LARGEST_FACTORIAL:
        raise ValueError(NO_NUMBER)
    return _bounded(Fraction(math.factorial(value.numerator)))


def binomial(total: Real, chosen: Real) -> Real:
    """Returns the number of ways to choose from a total of at most 9999."""
    if not _is_integer(total) or not _is_integer(chosen):
        raise ValueError(NO_NUMBER)
    if not 0 <= chosen <= total <= _LARGEST_FACTORIAL:
        raise ValueError(NO_NUMBER)
    return _bounded(Fraction(math.comb(total.numerator, chosen.numerator)))
