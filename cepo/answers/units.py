r"""Units: `km/h`, `\text{ cm}^2`, `square feet`, `°C`, `\$`, `平方厘米`, and words such as `apples`.

`unit_table` has the known units. A word that is no known unit is a basic unit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.exact_numbers import real
from cepo.answers.lexer import Group, Node, NodeCursor, Token, is_number, is_sign, text_of, word_of
from cepo.answers.tables import UNITS
from cepo.answers.typesetting import DEGREE
from cepo.answers.unit_table import (
    ATTACHED_SYMBOLS,
    BARE_DEGREE,
    CELSIUS,
    CURRENCIES,
    FAHRENHEIT,
    NO_UNIT,
    OHM,
    PREFIXES,
    Unit,
    counted_unit,
    known_unit,
)

_WORDS_WITHOUT_UNIT = frozenset(UNITS["words_without_unit"].split())
_DEGREE_WORDS = {"degrees", "degree", "deg"}
_SCALES: dict[str, Unit] = {
    "c": CELSIUS, "celsius": CELSIUS, "centigrade": CELSIUS, "f": FAHRENHEIT, "fahrenheit": FAHRENHEIT,
}  # fmt: skip
"""The temperature scales behind a degree sign."""
_EXPONENTS_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_EXPONENTS_BEHIND = {"squared": 2, "cubed": 3}
_JOINED_WORDS = {"squareunits": "units", "squareinches": "inches", "squarefeet": "feet"}
"""Units as MathVision writes them: `8\\sqrt{3}{squareinches}`."""
_PLAIN_LETTERS = frozenset(UNITS["plain_letters"])
"""Single letters that are units even if they are not upright (`6 s`); other letters are variables."""
_RARE_UNITS = set("THt")
"""Letters that are variables more often than units, even behind a space: `2 t`."""
_NOT_COUNTED = frozenset(UNITS["not_counted"].split())
"""Words behind a number that do not name what is counted."""


def read_unit(nodes: Sequence[Node], after_letters: bool = False) -> Unit | None:
    """Returns the unit that nodes state, or None if they state none. An unnamed unit (`units`) is `NO_UNIT`.

    Units in algebra, where a letter stands before them, must be upright and known.
    """
    return _Reader(nodes, after_letters).whole()


class _Reader(NodeCursor):
    """Reads a product and quotient of units."""

    def __init__(self, nodes: Sequence[Node], upright_and_known: bool) -> None:
        super().__init__(nodes)
        self._upright_and_known = upright_and_known

    def whole(self) -> Unit | None:
        """Returns the unit that all nodes state, or None."""
        unit: Unit | None = None
        sign = 1
        exponent_before = 1
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            if self._skip_quotient_sign():
                sign = -1
                continue
            if unit is not None and self._skip(r"\cdot", r"\times", "*", "-", "."):
                continue
            if word_of(node) in _EXPONENTS_BEFORE:
                exponent_before = _EXPONENTS_BEFORE[word_of(node)]
                self._place += 1
                self._skip(".")  # `sq. ft`
                continue
            factor = self._factor()
            if factor is None:
                return None
            exponent = sign * exponent_before * self._exponent()
            unit = (unit or NO_UNIT).times(factor, exponent)
            exponent_before = 1
        return unit

    def _skip_quotient_sign(self) -> bool:
        """Moves past a sign or word behind which units are divisors, as all that follow are in `J/kg K`."""
        if word_of(self._peek()) in ("per", "每"):
            self._place += 1
            return True
        return self._skip("/")

    def _factor(self) -> Unit | None:
        """Returns the next unit without its exponent."""
        inner = self._parenthesised()
        if inner is not None:
            return self._unit_of(inner)
        node = self._nodes[self._place]
        self._place += 1
        if isinstance(node, Group):
            return self._unit_of(node.body)
        if node.kind == "letters":
            return self._unit_of_letters(node)
        if node.kind == "number":
            return None
        if node.text == r"\frac":
            return self._fraction()
        if node.text == DEGREE:
            return self._temperature() or BARE_DEGREE
        if node.text == r"\mu":
            return self._prefixed_by_mu()
        return known_unit(node.text)

    def _unit_of(self, nodes: Sequence[Node]) -> Unit | None:
        return read_unit(nodes, self._upright_and_known)

    def _fraction(self) -> Unit | None:
        numerator = self._peek()
        denominator = self._peek(1)
        self._place += 2
        if not isinstance(numerator, Group) or not isinstance(denominator, Group):
            return None
        dividend = self._unit_of(numerator.body)
        divisor = self._unit_of(denominator.body)
        if dividend is None or divisor is None:
            return None
        return dividend.times(divisor, -1)

    def _unit_of_letters(self, node: Token) -> Unit | None:
        word = node.text
        if word.lower() in _WORDS_WITHOUT_UNIT:
            return NO_UNIT
        if word in _JOINED_WORDS:
            unit = known_unit(_JOINED_WORDS[word])
            return NO_UNIT if unit is None else NO_UNIT.times(unit, 2)
        is_symbol = node.spaced and word in ATTACHED_SYMBOLS and word != "in"
        if self._upright_and_known and not node.upright and not is_symbol:
            return None
        if word in PREFIXES and self._next_is(r"\Omega"):
            self._place += 1
            return OHM.by(real(10) ** PREFIXES[word])
        if len(word) == 1 and word.isascii() and not node.upright and word not in _PLAIN_LETTERS:
            return None
        if word in _DEGREE_WORDS:
            return self._temperature() or BARE_DEGREE
        unit = known_unit(word)
        if unit is not None:
            self._skip(".")  # `ft.`
            return unit
        return self._counted(node)

    def _counted(self, node: Token) -> Unit | None:
        """Returns the unit of what a word counts, or None for a word that counts nothing."""
        if self._upright_and_known or not node.text.isascii():
            return None
        word = node.text.lower()
        is_word = len(node.text) >= (2 if node.upright else 3) and _NOT_COUNTED.isdisjoint(
            (word, word.removesuffix("s"))
        )
        is_separate = node.upright or node.spaced
        return counted_unit(node.text) if is_word and is_separate else None

    def _temperature(self) -> Unit | None:
        """Returns the temperature scale whose letter or name comes next, if one does."""
        scale = _SCALES.get(word_of(self._peek()))
        if scale is not None:
            self._place += 1
        return scale

    def _prefixed_by_mu(self) -> Unit | None:
        node = self._peek()
        if not isinstance(node, Token) or node.kind != "letters":
            return None
        self._place += 1
        return known_unit("u" + node.text)

    def _exponent(self) -> int:
        """Returns the exponent that comes next, 1 if none does."""
        node = self._peek()
        if node is None:
            return 1
        is_behind_letters = text_of(self._nodes[self._place - 1]).isascii()
        if is_number(node) and is_behind_letters and not node.spaced and text_of(node) in ("2", "3"):
            self._place += 1
            return int(text_of(node))  # `cm2`
        if word_of(node) in _EXPONENTS_BEHIND:
            self._place += 1
            return _EXPONENTS_BEHIND[word_of(node)]
        raised = self._peek(1)
        if not is_sign(node, "^") or raised is None:
            return 1
        digits = list(raised.body) if isinstance(raised, Group) else [raised]
        sign = 1
        if digits and is_sign(digits[0], "-"):
            sign = -1
            digits = digits[1:]
        digit = text_of(digits[0]) if len(digits) == 1 and is_number(digits[0]) else ""
        if len(digit) == 1 and digit.isdigit():
            self._place += 2
            return sign * int(digit)
        return 1


def is_ambiguous(nodes: Sequence[Node]) -> bool:
    """Returns whether nodes behind a number may be variables as well as a unit: `s` in `6s`, `m^2` in `3m^2`."""
    first = nodes[0]
    if not isinstance(first, Token) or first.kind != "letters":
        return False
    if first.upright or not first.text.isascii():
        return False
    if first.spaced and first.text not in _RARE_UNITS:
        return False
    is_power = len(nodes) == 3 and is_sign(nodes[1], "^")
    if len(nodes) > 1 and not is_power:
        return False
    return len(first.text) <= 2 and first.text not in ATTACHED_SYMBOLS


def is_currency(node: Node) -> bool:
    """Returns whether a node is a sign of money, which stands before its value."""
    return isinstance(node, Token) and node.text in CURRENCIES


def may_be_in_a_unit(node: Node) -> bool:
    """Returns whether a unit can begin with this node."""
    if isinstance(node, Group) or node.kind == "letters":
        return True
    if node.kind == "number":
        return False
    is_named_command = node.kind == "command" and node.text[-1:].isalpha()
    return is_named_command or node.text in CURRENCIES or node.text in (DEGREE, "¢", "(")
