r"""Computes the value of an answer that states one real number: exactly if it is rational, else to 60 digits.

The grammar, in which juxtaposition binds more tightly than `/`, as in `1/2\pi`:

    number  = sum [":" sum]
    sum     = ["+" | "-"] product {("+" | "-") product}
    product = row {("\times" | "\cdot" | "*" | "/" | "\div") row}
    row     = ["+" | "-"] power {power}
    power   = atom {"^" exponent | "!" | "%"}
    atom    = decimal | integer "\frac{" integer "}{" integer "}" | "\frac" group group | "\sqrt" ["[" sum "]"] group
            | "\pi" | "e" | "\exp" atom | function | "\binom" group group | "(" sum ")" | "[" sum "]" | "{" sum "}" | "|" sum "|"
    function = ("\sin" | "\ln" | ...) ["^" exponent] argument | "\log" ["_" atom] argument
    argument = "(" sum ")" | power {power}

An angle is in radians (`cepo.rewards.spelling` converts degrees), and a logarithm without a base has base 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath.ctx_mp import MPContext  # pyright: ignore[reportMissingTypeStubs]

from cepo.rewards.digits import REPETENDS
from cepo.rewards.magnitude import is_too_long
from cepo.rewards.tokens import Group, Node, Token, is_number, is_sign, read_nodes

Real = Any
"""A `Fraction`, which is exact, or a floating-point number of 60 digits whose exponent is unbounded."""

_DIGITS = 60
_CONTEXT: Any = MPContext()
_CONTEXT.dps = _DIGITS
_EQUAL: Any = _CONTEXT.mpf(10) ** -40
_NOISE: Any = _CONTEXT.mpf(10) ** -50
_MOST_EXACT_BITS = 40_000
"""About 12,000 digits; a larger fraction is rounded to 60 digits."""
_LARGEST_EXPONENT = 10**12
_LARGEST_FACTORIAL = 9_999
_LONGEST_ROOT_DIGITS = 400
_NO_NUMBER = "the nodes state no real number"
PI: Real = +_CONTEXT.pi
_LARGEST_ANGLE = 10**6
_LOGARITHMS = (r"\ln", r"\log", r"\lg")
_INVERSES: dict[str, Any] = {
    r"\arcsin": _CONTEXT.asin, r"\arccos": _CONTEXT.acos, r"\arctan": _CONTEXT.atan,
}  # fmt: skip
_INVERSE_OF = {r"\sin": r"\arcsin", r"\cos": r"\arccos", r"\tan": r"\arctan"}
_ANGLES = (r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc")
_FUNCTIONS = (*_LOGARITHMS, *_INVERSES, *_ANGLES)
_FACTORS = ("(", r"\frac", r"\sqrt", r"\pi", r"\exp", r"\binom", *_FUNCTIONS)
"""What begins a further factor of a product without a sign, apart from numbers, braces and `e`."""


@lru_cache(maxsize=8192)
def value_of(text: str) -> Real | None:
    """Returns the value of a text in normal form that states one real number (a ratio is a fraction), else None."""
    if is_too_long(text):
        return None
    return value_of_nodes(read_nodes(text))


def value_of_nodes(nodes: Sequence[Node]) -> Real | None:
    """Returns the value that nodes in normal form state, or None."""
    places = [place for place, node in enumerate(nodes) if is_sign(node, ":")]
    try:
        if len(places) == 1:
            return _divided(_Reader(nodes[: places[0]]).whole(), _Reader(nodes[places[0] + 1 :]).whole())
        return _Reader(nodes).whole()
    except (ZeroDivisionError, OverflowError, ValueError, RecursionError):
        return None


def same_value(first: Real, second: Real) -> bool:
    """Returns whether two values are equal: fractions exactly, others to 40 significant digits."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    left = floating(first)
    right = floating(second)
    return bool(abs(left - right) <= _EQUAL * max(abs(left), abs(right)))


def near(first: Real, second: Real, relative: float) -> bool:
    """Returns whether two values differ by at most a part of the larger one."""
    left = floating(first)
    right = floating(second)
    return bool(abs(left - right) <= relative * max(abs(left), abs(right)))


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
    if converted is not None and (converted or value == 0):
        return f"{converted + 0.0:.12g}"
    return str(_CONTEXT.nstr(floating(value), 12))


def scaled(value: Real, factor: Real) -> Real:
    """Returns the product of two values."""
    if isinstance(value, Fraction) and isinstance(factor, Fraction):
        return _bounded(value * factor)
    return floating(value) * floating(factor)


def shifted(value: Real, offset: Real) -> Real:
    """Returns the sum of two values."""
    return _added(value, offset)


def _bounded(value: Fraction) -> Real:
    """Returns a fraction as it is, or rounded if it has too many digits to compute with quickly."""
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return value if bits <= _MOST_EXACT_BITS else floating(value)


def _added(first: Real, second: Real) -> Real:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _bounded(first + second)
    left = floating(first)
    right = floating(second)
    total = left + right
    if abs(total) <= _NOISE * max(abs(left), abs(right)):
        return Fraction(0)  # what is left of two equal roots
    return total


def _divided(first: Real, second: Real) -> Real:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _bounded(first / second)
    return floating(first) / floating(second)


def _raised(base: Real, exponent: Real) -> Real:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent.numerator) * bits <= _MOST_EXACT_BITS:
                return base**exponent.numerator
        elif base >= 0 and abs(exponent.numerator) < 100:
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                return root**exponent.numerator
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(_NO_NUMBER)
    is_whole = isinstance(exponent, Fraction) and exponent.denominator == 1
    if base < 0 and not is_whole:
        raise ValueError(_NO_NUMBER)
    if is_whole:
        return floating(base) ** exponent.numerator
    return floating(base) ** floating(exponent)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Returns the root of a fraction that is the power of a fraction, else None."""
    parts: list[int] = []
    for part in (value.numerator, value.denominator):
        if len(bin(part)) > 4 * _LONGEST_ROOT_DIGITS or degree > _LONGEST_ROOT_DIGITS:
            return None
        root = int(_CONTEXT.nint(_CONTEXT.root(part, degree)))
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(parts[0], parts[1])


def _root(value: Real, degree: Real) -> Real:
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree.numerator % 2 == 1
    if degree == 0:
        raise ValueError(_NO_NUMBER)
    if value < 0 and is_odd:
        return -_raised(-value, 1 / degree)
    return _raised(value, _divided(Fraction(1), degree))


def _factorial(value: Real) -> Real:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= _LARGEST_FACTORIAL:
        raise ValueError(_NO_NUMBER)
    return _bounded(Fraction(math.factorial(value.numerator)))


def _binomial(total: Real, chosen: Real) -> Real:
    values = [value for value in (total, chosen) if isinstance(value, Fraction) and value.denominator == 1]
    if len(values) < 2 or not 0 <= values[1] <= values[0] <= _LARGEST_FACTORIAL:
        raise ValueError(_NO_NUMBER)
    return _bounded(Fraction(math.comb(values[0].numerator, values[1].numerator)))


def _of_angle(name: str, angle: Real) -> Real:
    """Returns the value of a trigonometric function; raises ZeroDivisionError at a pole."""
    if abs(angle) > _LARGEST_ANGLE:
        raise ValueError(_NO_NUMBER)
    sine, cosine = (_without_noise(function(floating(angle))) for function in (_CONTEXT.sin, _CONTEXT.cos))
    values: dict[str, tuple[Real, Real]] = {
        r"\sin": (sine, Fraction(1)), r"\cos": (cosine, Fraction(1)), r"\tan": (sine, cosine), r"\cot": (cosine, sine),
        r"\sec": (Fraction(1), cosine), r"\csc": (Fraction(1), sine),
    }  # fmt: skip
    return _divided(*values[name])


def _without_noise(value: Any) -> Real:
    """Returns 0 for the sine of the rounded π."""
    return Fraction(0) if abs(value) <= _NOISE else value


def _inverse(name: str, value: Real) -> Real:
    if name != r"\arctan" and abs(value) > 1:
        raise ValueError(_NO_NUMBER)
    return _without_noise(_INVERSES[name](floating(value)))


def _logarithm(value: Real, base: Real) -> Real:
    if value <= 0 or base <= 0:
        raise ValueError(_NO_NUMBER)
    return _divided(_without_noise(_CONTEXT.ln(floating(value))), _without_noise(_CONTEXT.ln(floating(base))))


class _Reader:
    """Reads a number from nodes, one after the other."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._place = 0

    def whole(self) -> Real:
        """Returns the value of all nodes."""
        value = self._sum()
        if self._node() is not None:
            raise ValueError(_NO_NUMBER)
        return value

    def _node(self, ahead: int = 0) -> Node | None:
        place = self._place + ahead
        return self._nodes[place] if place < len(self._nodes) else None

    def _next_is(self, *texts: str) -> bool:
        node = self._node()
        return node is not None and is_sign(node, *texts)

    def _sum(self) -> Real:
        value = self._product()
        while self._next_is("+", "-"):
            is_minus = self._next_is("-")
            self._place += 1
            term = self._product()
            value = _added(value, -term if is_minus else term)
        return value

    def _product(self) -> Real:
        value = self._row()
        while self._next_is(r"\times", r"\cdot", "*", "/", r"\div"):
            is_quotient = self._next_is("/", r"\div")
            self._place += 1
            factor = self._row()
            value = _divided(value, factor) if is_quotient else scaled(value, factor)
        return value

    def _row(self) -> Real:
        if self._next_is("+", "-"):
            is_minus = self._next_is("-")
            self._place += 1
            value = self._row()
            return -value if is_minus else value
        value = self._power()
        while self._starts_a_factor():
            value = scaled(value, self._power())
        return value

    def _starts_a_factor(self) -> bool:
        node = self._node()
        previous = self._nodes[self._place - 1]
        if node is None:
            return False
        if is_number(node):
            return not is_number(previous)
        is_e = isinstance(node, Token) and node.kind == "letters" and node.text == "e"
        return isinstance(node, Group) or is_e or is_sign(node, *_FACTORS)

    def _power(self) -> Real:
        value = self._atom()
        while True:
            if self._next_is("^"):
                self._place += 1
                exponent = self._exponent()
                value = _raised(value, exponent)
            elif self._next_is("!"):
                self._place += 1
                if self._next_is("!"):
                    raise ValueError(_NO_NUMBER)
                value = _factorial(value)
            elif self._next_is("%"):
                self._place += 1
                value = scaled(value, Fraction(1, 100))
            else:
                return value

    def _exponent(self) -> Real:
        value = self._atom()
        if self._next_is("^"):
            self._place += 1
            value = _raised(value, self._exponent())
        return value

    def _atom(self) -> Real:
        node = self._node()
        if node is None:
            raise ValueError(_NO_NUMBER)
        self._place += 1
        if isinstance(node, Group):
            return _Reader(node.body).whole()
        if node.kind == "number":
            return self._decimal(node.text)
        if node.text == "e" and node.kind == "letters":
            return +_CONTEXT.e
        if node.text == r"\pi":
            return PI
        if node.text == r"\binom":
            return _binomial(self._group(), self._group())
        if node.text in _FUNCTIONS and node.kind == "command":
            return self._function(node.text)
        if node.text == r"\exp":
            return _raised(+_CONTEXT.e, self._atom())
        if node.text == r"\frac":
            return _divided(self._group(), self._group())
        if node.text == r"\sqrt":
            degree: Real = Fraction(2)
            if self._next_is("["):
                self._place += 1
                degree = self._closed("]")
            return _root(self._group(), degree)
        closing = {"(": ")", "[": "]", "|": "|"}.get(node.text)
        if closing is None:
            raise ValueError(_NO_NUMBER)
        value = self._closed(closing)
        return abs(value) if closing == "|" else value

    def _function(self, name: str) -> Real:
        """Reads what stands behind the name of a function, and returns its value."""
        if name in _LOGARITHMS:
            base: Real = +_CONTEXT.e if name == r"\ln" else Fraction(10)
            if self._next_is("_"):
                self._place += 1
                base = self._atom()
            return _logarithm(self._argument(), base)
        exponent: Real = Fraction(1)
        if self._next_is("^"):
            self._place += 1
            exponent = self._exponent()
        if exponent == -1:
            inverse = _INVERSE_OF.get(name)
            if inverse is None:
                raise ValueError(_NO_NUMBER)
            return _inverse(inverse, self._argument())
        argument = self._argument()
        return _raised(_inverse(name, argument) if name in _INVERSES else _of_angle(name, argument), exponent)

    def _argument(self) -> Real:
        r"""Reads parentheses, or factors up to the next function: `2\pi` of `\sin 2\pi \cos \pi`."""
        if self._next_is("("):
            return self._atom()
        value = self._power()
        while self._starts_a_factor() and not self._next_is(*_FUNCTIONS, "("):
            value = scaled(value, self._power())
        return value

    def _closed(self, closing: str) -> Real:
        value = self._sum()
        if not self._next_is(closing):
            raise ValueError(_NO_NUMBER)
        self._place += 1
        return value

    def _group(self) -> Real:
        node = self._node()
        if not isinstance(node, Group):
            raise ValueError(_NO_NUMBER)
        self._place += 1
        return _Reader(node.body).whole()

    def _decimal(self, text: str) -> Real:
        r"""Returns a decimal, with the digits that repeat (`0.1\overline{6}`) or the fraction of a mixed number."""
        value = Fraction(text)
        has_point = "." in text
        if self._next_is(".") and not has_point:
            self._place += 1
            has_point = True
            if not self._next_is(*REPETENDS):
                raise ValueError(_NO_NUMBER)
        if has_point and self._next_is(*REPETENDS):
            self._place += 1
            digits = _digits_of(self._node())
            self._place += 1
            places = len(text.partition(".")[2])
            return value + Fraction(int(digits), 10**places * (10 ** len(digits) - 1))
        if not has_point and self._next_is(r"\frac"):
            numerator = _digits_of(self._node(1), required=False)
            denominator = _digits_of(self._node(2), required=False)
            if numerator and denominator:
                self._place += 3
                return value + Fraction(int(numerator), int(denominator))
        return value


def _digits_of(node: Node | None, required: bool = True) -> str:
    """Returns the digits in a group that holds an integer; else an empty text, or raises if they are required."""
    body = node.body if isinstance(node, Group) else (node,)
    only = body[0] if len(body) == 1 else None
    if isinstance(only, Token) and only.kind == "number" and only.text.isdigit():
        return only.text
    if required:
        raise ValueError(_NO_NUMBER)
    return ""
