r"""Statements: the value of an answer in its normal form, and its unit.

statement = {name "="} quantity          `x = 2 \cdot 30 = 60` states 60
quantity  = money number | number [unit] | number unit number unit ... | algebra [upright unit] | text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cepo.answers.exact_numbers import near
from cepo.answers.lexer import Group, Node, Token, is_number, is_sign, text_of, written
from cepo.answers.numbers import value_of
from cepo.answers.spelling import nodes_of
from cepo.answers.tables import UNITS
from cepo.answers.typesetting import DEGREE, without_wrappers
from cepo.answers.unit_table import NO_UNIT, Unit
from cepo.answers.units import is_ambiguous, is_currency, may_be_in_a_unit, read_unit

LONGEST_ANSWER = 512
"""The number of characters up to which an answer is read; longer ones are compared as they are."""
_MOST_PASSES = 8
_ROUNDING = 0.05
"""The largest relative difference between the sides of a calculation such as `20/3 = 6.7`."""


@dataclass(frozen=True)
class Statement:
    """What an answer states.

    Attributes:
        value: the value in normal form, without a unit.
        unit: its unit, or None if the answer names none.
        as_quantity: value and unit of an answer such as `6s`, whose letter is read as a variable unless the other
            answer has a unit; else None.
    """

    value: str
    unit: Unit | None = None
    as_quantity: tuple[str, Unit] | None = None


@lru_cache(maxsize=8192)
def read_statement(text: str, commas: bool = True) -> Statement:
    """Returns what a text states; one of more than 512 characters is its own value.

    Args:
        text: an answer, without the box around it.
        commas: whether `1,234` is a number and not a list of two numbers.
    """
    if len(text) > LONGEST_ANSWER:
        return Statement(text.strip())
    statement = _read_once(text, commas)
    # The text of a value may be read further: of a box within a formula, or two units of one value.
    for _ in range(_MOST_PASSES):
        following = _read_once(statement.value, commas)
        if following.value == statement.value:
            break
        unit = statement.unit if following.unit is None else following.unit
        statement = replace(following, unit=unit)
    return statement if len(statement.value) <= LONGEST_ANSWER else Statement(text.strip())


def _read_once(text: str, commas: bool) -> Statement:
    nodes = nodes_of(without_wrappers(text), commas)
    while nodes and is_sign(nodes[-1], r"\\"):  # a line break
        nodes.pop()
    while len(nodes) == 1 and isinstance(nodes[0], Group):
        nodes = list(nodes[0].body)
    sides = _split(nodes, "=")
    if len(sides) > 1 and not sides[0]:
        sides = sides[1:]  # `= 7`
    statements = [_read_side(side) for side in sides]
    statement = statements[0] if len(statements) == 1 else _statement_of_equation(sides, statements)
    return replace(statement, value=statement.value.removeprefix("+"))


def _split(nodes: Sequence[Node], sign: str) -> list[list[Node]]:
    parts: list[list[Node]] = [[]]
    for node in nodes:
        if is_sign(node, sign):
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def _read_side(nodes: list[Node]) -> Statement:
    r"""Reads what stands on one side of `=`; of `A \approx B` both values and the first unit count."""
    quantities = [read_quantity(part) for part in _split(nodes, r"\approx")]
    if len(quantities) == 1:
        return quantities[0]
    first_value = quantities[0].value
    if not first_value or is_name(first_value):
        quantities = quantities[1:]  # `x \approx 34.6`
    value = r"\approx ".join(quantity.value for quantity in quantities)
    units = [quantity.unit for quantity in quantities if quantity.unit is not None]
    return Statement(value, units[0] if units else None)


_SEVERAL_STATEMENTS = re.compile(r";|,(?!\d{3})|(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])")
_LETTER = re.compile(r"[A-Za-z\u4e00-\u9fff]")
_SPACE_BETWEEN_LETTERS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_ARTICLE = re.compile(r"\A(?:the|an?)\s+(?=[a-z]{2})")
_NOT_IN_A_NAME = re.compile(
    r"[+\-*/^<>,:;]|\\(?:frac|sqrt|pi|times|cdot|div|approx|pm|neq|leq?|geq?|lt|gt|begin|in|cup)(?![A-Za-z])"
)


def _statement_of_equation(sides: list[list[Node]], statements: list[Statement]) -> Statement:
    r"""Returns what an equation states.

    `m\angle A = 2 \cdot 30 = 60` and `60 = x` state 60; `2x = 60` and several statements remain as they are.
    """
    texts = [text_without_degrees(side) for side in sides]
    values = [statement.value for statement in statements]
    for text in texts[1:-1]:
        if _SEVERAL_STATEMENTS.search(text):  # `x = 1, y = 2`
            return Statement("=".join(texts))
    first = values[0]
    last = values[-1]
    is_calculation = all(states_a_value(value) for value in values)  # `2 \cdot 30 = 60`
    if is_calculation and not _may_be_equal(statements[0], statements[-1]):
        return Statement("=".join(values))  # `6 = 5`
    if is_calculation or (is_name(first) and states_a_value(last)):
        return statements[-1]
    if len(sides) == 2 and states_a_value(first) and is_name(last):
        return statements[0]
    return Statement("=".join(values))


def _may_be_equal(first: Statement, last: Statement) -> bool:
    """Returns whether two sides of an equation have a unit, or values that are equal but for rounding."""
    first_value = value_of(first.value)
    last_value = value_of(last.value)
    if first_value is None or last_value is None or first.unit is not None or last.unit is not None:
        return True
    return near(first_value, last_value, _ROUNDING)


def states_a_value(text: str) -> bool:
    r"""Returns whether a text in normal form is one number, or several joined by `\approx`."""
    return all(value_of(part.strip()) is not None for part in text.split(r"\approx"))


def is_name(text: str) -> bool:
    r"""Returns whether a text has a letter and no arithmetic: a variable, a segment, `m\angle A`, a word."""
    text = text.strip()
    has_letter = _LETTER.search(text) is not None
    return has_letter and not text[0].isdigit() and not _NOT_IN_A_NAME.search(text)


def without_name(text: str) -> str:
    r"""Returns `2x+1` for `y=2x+1`; an equation of two names (`AB=CD`) stays as it is."""
    name, value = named_parts(text)
    if not name or not value:
        return text
    is_product = len(name) == 1 and len(value) > 1 and not value.isupper()  # `F=ma`
    return value if is_product or not is_name(value) else text


def named_parts(text: str) -> tuple[str, str]:
    """Splits `x=5` into the name and the value; the name is empty if there is none."""
    name, sign, value = text.partition("=")
    is_named = sign and is_name(name) and "=" not in value
    return (name, value) if is_named else ("", text)


def folded(value: str) -> str:
    """Returns a value in small letters and without the spaces between its words."""
    return _SPACE_BETWEEN_LETTERS.sub("", value.casefold())


def folded_name(value: str) -> str:
    """Returns words in small letters without spaces, full stops and an article before them: `usa` for `the U.S.A.`"""
    return folded(_ARTICLE.sub("", value.casefold())).replace(".", "").replace(" ", "")


def has_unit(statement: Statement) -> bool:
    """Returns whether a statement names a unit; `units` names none."""
    return statement.unit is not None and statement.unit != NO_UNIT


_LONGEST_UNIT = 24
"""The largest number of nodes of a unit; `kg m^2/s^2` has nine."""


def read_quantity(nodes: list[Node]) -> Statement:
    """Returns the value and unit that simplified nodes state."""
    return _money(nodes) or _number_with_unit(nodes) or _compound(nodes) or _algebra_with_unit(nodes)


def text_without_degrees(nodes: Sequence[Node]) -> str:
    """Returns the text of nodes without their degree signs."""
    return written(_without_degrees(nodes))


def _without_degrees(nodes: Sequence[Node]) -> list[Node]:
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_without_degrees(node.body)), node.spaced))
        elif not is_sign(node, DEGREE):
            result.append(node)
    return result


def _places_of_unit(nodes: Sequence[Node]) -> range:
    """Returns the places at which a unit may begin, from left to right: behind a value, and not too far from the end."""
    return range(max(1, len(nodes) - _LONGEST_UNIT), len(nodes))


def _number_with_unit(nodes: list[Node]) -> Statement | None:
    for place in _places_of_unit(nodes):
        if not may_be_in_a_unit(nodes[place]) or nodes[place - 1] == Token("sign", "^"):
            continue
        value = nodes[:place]
        behind = nodes[place:]
        unit = read_unit(behind)
        if unit is None or value_of(text_without_degrees(value)) is None:
            continue
        value_text = text_without_degrees(value)
        if is_ambiguous(behind):
            return Statement(text_without_degrees(nodes), as_quantity=(value_text, unit))
        return Statement(value_text, unit)
    return None


_SHORT_MULTIPLES: dict[str, str] = UNITS["short_multiples"]
_SHORT_MULTIPLE = re.compile(r"(-?\d+(?:\.\d+)?)(k|K|M|B|bn)")


def with_multiple(value: str) -> str:
    r"""Returns `1.5\cdot1000000` for `1.5M`, and other values as they are."""
    match = _SHORT_MULTIPLE.fullmatch(value)
    return value if match is None else rf"{match[1]}\cdot{_SHORT_MULTIPLES[match[2]]}"


def _money(nodes: list[Node]) -> Statement | None:
    r"""Reads `\$5`, `-\$5` and `US\$ 5`."""
    is_negative = bool(nodes) and is_sign(nodes[0], "-")
    is_of_country = bool(nodes) and text_of(nodes[0]) == "US"
    place = 1 if is_negative or is_of_country else 0
    if len(nodes) <= place + 1 or not is_currency(nodes[place]):
        return None
    sign_of_money = nodes[place]
    behind = nodes[place + 1 :]
    if is_sign(behind[0], "."):  # `Rs. 500`
        behind = behind[1:]
    if len(behind) == 2 and text_of(behind[1]) in _SHORT_MULTIPLES:  # `\$3.2M`
        behind = [behind[0], Token("command", r"\cdot"), Token("number", _SHORT_MULTIPLES[text_of(behind[1])])]
    amount = [nodes[0], *behind] if is_negative else behind
    return _sum_of_money(sign_of_money, amount)


def _sum_of_money(sign_of_money: Node, amount: list[Node]) -> Statement | None:
    currency = read_unit([sign_of_money])
    quantity = read_quantity(amount)
    if currency is None or value_of(quantity.value) is None:
        return None
    is_named_twice = quantity.unit is not None and quantity.unit.powers == currency.powers  # `\$5 dollars`
    if quantity.unit is None or is_named_twice:
        return Statement(quantity.value, currency)
    return Statement(quantity.value, quantity.unit.times(currency, 1))


_PARTS_OF_DEGREES = {"'": "arcmin", '"': "arcsec"}
_PARTS_OF_FEET = {"'": "ft", '"': "in"}
_PARTS_OF_HOURS = {"m": "min", "分": "min"}


def _compound(nodes: list[Node]) -> Statement | None:
    r"""Reads `2 h 30 min`, `5 ft 3 in` and `60^\circ 30'` as one value in the first unit."""
    segments = _numbers_with_units(nodes)
    if len(segments) < 2:
        return None
    names = _names_of_parts(nodes)
    quantities: list[tuple[str, Unit]] = []
    for number, behind in segments:
        unit = read_unit([_renamed(node, names) for node in behind])
        if unit is None or value_of(number) is None or unit.offset or not unit.powers:
            return None
        quantities.append((number, unit))
    text, first_unit = quantities[0]
    for number, unit in quantities[1:]:
        num_parts = round(first_unit.factor / unit.factor)
        if unit.powers != first_unit.powers or num_parts < 2:
            return None
        text += rf"+\frac{{{number}}}{{{num_parts}}}"
    return Statement(text, first_unit)


def _names_of_parts(nodes: Sequence[Node]) -> Mapping[str, str]:
    """Returns which units the marks of a compound stand for, as its other units tell."""
    if any(text_of(node) in ("h", "hr", "小时", "时") for node in nodes):
        return _PARTS_OF_HOURS
    if any(is_sign(node, DEGREE) for node in nodes):
        return _PARTS_OF_DEGREES
    return _PARTS_OF_FEET


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if isinstance(node, Token) and node.text in names:
        return Token("letters", names[node.text], spaced=True, upright=True)
    return node


def _numbers_with_units(nodes: list[Node]) -> list[tuple[str, list[Node]]]:
    """Splits nodes into numbers, each with what stands behind it; `and` and commas between them are dropped.

    Empty if a number has nothing behind it, or if something stands before the first one.
    """
    segments: list[tuple[str, list[Node]]] = []
    previous: Node | None = None
    for node in nodes:
        is_exponent = previous is not None and is_sign(previous, "^")
        if is_number(node) and not is_exponent:
            segments.append((text_of(node), []))
        elif not segments:
            return []
        elif is_sign(node, ",") or text_of(node) == "and":
            continue
        else:
            segments[-1][1].append(node)
        previous = node
    if any(not behind for _, behind in segments):
        return []
    return segments


_SIGNS_OF_STATEMENTS = (
    ",", ";", r"\angle", r"\cong", r"\sim", r"\parallel", r"\perp", r"\triangle", r"\infty", r"\in", r"\begin",
)  # fmt: skip
"""Signs in texts that are no quantities; a list has the units of its parts."""
_NEVER_BEFORE_A_UNIT = ("^", "_", "+", "-", "=", ",", "(", r"\frac", r"\sqrt")


def _algebra_with_unit(nodes: list[Node]) -> Statement:
    r"""Reads `2x + 3 \text{ cm}`: behind algebra, a unit must be upright and known, or a degree sign."""
    whole = Statement(text_without_degrees(nodes))
    if any(is_sign(node, *_SIGNS_OF_STATEMENTS) or text_of(node) in ("and", "or") for node in nodes):
        return whole
    first_word = _place_of_first_word(nodes)
    for place in _places_of_unit(nodes):
        if place > first_word:
            break  # words are no algebra
        if (
            not may_be_in_a_unit(nodes[place])
            or is_sign(nodes[place], DEGREE)
            or is_sign(nodes[place - 1], *_NEVER_BEFORE_A_UNIT)
        ):
            continue
        unit = read_unit(nodes[place:], after_letters=True)
        if unit is not None:
            return Statement(text_without_degrees(nodes[:place]), unit)
    return whole


def _place_of_first_word(nodes: Sequence[Node]) -> int:
    """Returns the place of the first upright letters, or the number of nodes."""
    for place, node in enumerate(nodes):
        if isinstance(node, Token) and node.kind == "letters" and node.upright:
            return place
    return len(nodes)
