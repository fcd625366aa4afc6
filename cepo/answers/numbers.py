r"""The value of an answer that states one real number (`cepo.answers.exact_numbers`).

The grammar, in which juxtaposition binds more tightly than `/`, as in `1/2\pi`:

    number  = sum [":" sum]
    sum     = ["+" | "-"] product {("+" | "-") product}
    product = row {("\times" | "\cdot" | "*" | "/" | "\div") row}
    row     = ["+" | "-"] power {power}
    power   = atom {"^" exponent | "!" | "%"}
    atom    = decimal | integer "\frac{" integer "}{" integer "}" | "\frac" group group | "\sqrt" ["[" sum "]"] group
            | "\pi" | "e" | "\binom" group group | "(" sum ")" | "[" sum "]" | "{" sum "}" | "|" sum "|"

Numbers with functions (`\sin`, `\log`) are read by math-verify and computed by sympy: `cepo.answers.algebra`. An angle is
in radians (`cepo.answers.spelling` converts degrees), and a logarithm without a base has base 10.
"""

from __future__ import annotations

import re
from functools import lru_cache

from cepo.answers.algebra import LONGEST_EXPRESSION, constant_value, is_nested_too_deep
from cepo.answers.digits import REPETEND
from cepo.answers.exact_numbers import (
    NO_NUMBER,
    PI,
    E,
    Real,
    added,
    binomial,
    factorial,
    power,
    real,
    root,
)
from cepo.answers.lexer import Group, Node, NodeCursor, Token, is_number, is_sign, read_nodes

ANGLE_FUNCTIONS = (r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc")
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|ln|log)(?![A-Za-z])")
_FACTORS = ("(", r"\frac", r"\sqrt", r"\pi", r"\binom")
"""What begins a further factor of a product without a sign, apart from numbers, braces and `e`."""
_CLOSING = {"(": ")", "[": "]", "|": "|"}


@lru_cache(maxsize=8192)
def value_of(text: str) -> Real | None:
    """Returns the value of a text in normal form that states one real number (a ratio is a fraction), else None."""
    if len(text) > LONGEST_EXPRESSION or is_nested_too_deep(text):
        return None
    if _FUNCTION.search(text):
        return constant_value(text)
    nodes = read_nodes(text)
    colons = [place for place, node in enumerate(nodes) if is_sign(node, ":")]
    try:
        if len(colons) != 1:
            return _Reader(nodes).whole()
        dividend = _Reader(nodes[: colons[0]]).whole()
        divisor = _Reader(nodes[colons[0] + 1 :]).whole()
        return dividend / divisor
    except (ZeroDivisionError, OverflowError, ValueError, RecursionError):
        return None


class _Reader(NodeCursor):
    """Reads a number from nodes, one after the other; a method per rule of the grammar."""

    def whole(self) -> Real:
        """Returns the value of all nodes."""
        value = self._sum()
        if self._peek() is not None:
            raise ValueError(NO_NUMBER)
        return value

    def _sum(self) -> Real:
        value = self._product()
        while self._next_is("+", "-"):
            is_minus = self._next_is("-")
            self._place += 1
            term = self._product()
            value = added(value, -term if is_minus else term)
        return value

    def _product(self) -> Real:
        value = self._row()
        while self._next_is(r"\times", r"\cdot", "*", "/", r"\div"):
            is_quotient = self._next_is("/", r"\div")
            self._place += 1
            factor = self._row()
            value = value / factor if is_quotient else value * factor
        return value

    def _row(self) -> Real:
        if self._skip("+"):
            return self._row()
        if self._skip("-"):
            return -self._row()
        value = self._power()
        while self._starts_a_factor():
            value *= self._power()
        return value

    def _starts_a_factor(self) -> bool:
        node = self._peek()
        if node is None:
            return False
        if isinstance(node, Group):
            return True
        if node.kind == "number":
            previous = self._nodes[self._place - 1]
            return not is_number(previous)
        if node.kind == "letters":
            return node.text == "e"
        return node.text in _FACTORS

    def _power(self) -> Real:
        value = self._atom()
        while True:
            if self._skip("^"):
                value = power(value, self._exponent())
            elif self._skip("!"):
                if self._next_is("!"):  # `5!!` is the double factorial
                    raise ValueError(NO_NUMBER)
                value = factorial(value)
            elif self._skip("%"):
                value /= 100
            else:
                return value

    def _exponent(self) -> Real:
        value = self._atom()
        if self._skip("^"):
            value = power(value, self._exponent())
        return value

    def _atom(self) -> Real:
        node = self._peek()
        if node is None:
            raise ValueError(NO_NUMBER)
        self._place += 1
        if isinstance(node, Group):
            return _Reader(node.body).whole()
        if node.kind == "number":
            return self._decimal(node.text)
        if node.kind == "letters":
            if node.text == "e":
                return E
            raise ValueError(NO_NUMBER)
        return self._command(node.text)

    def _command(self, name: str) -> Real:
        """Returns the value that begins with a command or an opening bracket, which has been read."""
        if name == r"\pi":
            return PI
        if name == r"\frac":
            numerator = self._group()
            denominator = self._group()
            return numerator / denominator
        if name == r"\sqrt":
            degree: Real = self._closed("]") if self._skip("[") else real(2)
            return root(self._group(), degree)
        if name == r"\binom":
            total = self._group()
            chosen = self._group()
            return binomial(total, chosen)
        if name == "|":
            return abs(self._closed("|"))
        if name in _CLOSING:
            return self._closed(_CLOSING[name])
        raise ValueError(NO_NUMBER)

    def _closed(self, closing: str) -> Real:
        """Returns the sum up to a closing bracket."""
        value = self._sum()
        if not self._skip(closing):
            raise ValueError(NO_NUMBER)
        return value

    def _group(self) -> Real:
        node = self._peek()
        if not isinstance(node, Group):
            raise ValueError(NO_NUMBER)
        self._place += 1
        return _Reader(node.body).whole()

    def _decimal(self, text: str) -> Real:
        r"""Returns a decimal, with the digits that repeat (`0.1\overline{6}`) or the fraction of a mixed number."""
        value = real(text)
        if "." not in text:
            if self._skip("."):  # `0.\overline{3}`
                if not self._next_is(REPETEND):
                    raise ValueError(NO_NUMBER)
            else:
                return value + self._fraction_of_mixed_number()
        if not self._skip(REPETEND):
            return value
        digits = _digits_of(self._peek())
        if not digits:
            raise ValueError(NO_NUMBER)
        self._place += 1
        num_decimals = len(text.partition(".")[2])
        return value + real(digits) / (10**num_decimals * (10 ** len(digits) - 1))

    def _fraction_of_mixed_number(self) -> Real:
        r"""Returns the fraction of two integers behind an integer, as in `13\frac{1}{3}`; 0 if there is none."""
        if not self._next_is(r"\frac"):
            return real(0)
        numerator = _digits_of(self._peek(1))
        denominator = _digits_of(self._peek(2))
        if not numerator or not denominator:
            return real(0)
        self._place += 3
        return real(numerator) / int(denominator)


def _digits_of(node: Node | None) -> str:
    """Returns the digits of an integer, alone or in a group; else an empty text."""
    body = node.body if isinstance(node, Group) else (node,)
    only_node = body[0] if len(body) == 1 else None
    if isinstance(only_node, Token) and only_node.kind == "number" and only_node.text.isdigit():
        return only_node.text
    return ""
