r"""Reads an answer as a statement: a value in its normal form, and its unit.

statement = {name "="} value          `x = 2 \cdot 30 = 60` states 60
value     = number [unit] | money number | number unit number unit ... | algebra [upright unit] | text
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cepo.rewards.extraction import last_boxed_span
from cepo.rewards.numbers import value_of, value_of_nodes
from cepo.rewards.spelling import nodes_of
from cepo.rewards.tokens import Group, Node, Token, is_number, is_sign, text_of
from cepo.rewards.typesetting import DEGREE
from cepo.rewards.units import NO_UNIT, Unit, is_ambiguous, is_currency, may_be_in_a_unit, read_unit
from cepo.rewards.writing import written

LONGEST_ANSWER = 512
"""The number of characters up to which an answer is read; longer ones are compared as they are."""
_MOST_PASSES = 8
_LONGEST_UNIT = 24
"""The largest number of nodes of a unit; `kg m^2/s^2` has nine."""


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
    for _ in range(_MOST_PASSES):
        following = _read_once(statement.value, commas)
        if following.value == statement.value:
            break
        unit = statement.unit if following.unit is None else following.unit
        statement = replace(following, unit=unit)
    return statement if len(statement.value) <= LONGEST_ANSWER else Statement(text.strip())


def _read_once(text: str, commas: bool) -> Statement:
    nodes = nodes_of(_without_wrappers(text), commas)
    while nodes and is_sign(nodes[-1], r"\\"):  # a line break
        nodes.pop()
    while len(nodes) == 1 and isinstance(nodes[0], Group):
        nodes = list(nodes[0].body)
    parts = _split(nodes, "=")
    if len(parts) > 1 and not parts[0]:
        parts = parts[1:]  # `= 7`
    statements = [_read_part(part) for part in parts]
    statement = statements[0] if len(statements) == 1 else _value_of_equation(parts, statements)
    return replace(statement, value=statement.value.removeprefix("+"))


_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_EQUATION = re.compile(
    r"\\begin\{((?:equation|align|aligned|gather|gathered|split|math|displaymath|multline)\*?)\}(.*)\\end\{\1\}",
    re.DOTALL,
)
"""An environment of one formula."""
_REPEATING_DECIMAL = re.compile(r"(\d+\.\d{0,12}?)(\d{1,6}?)\2+(?:\.\.\.|…|\\[lc]?dots)")
r"""`0.333...` and `0.1666\ldots`: digits that come at least twice before the points."""
_TRAILING_PUNCTUATION = re.compile(r"(?:\\[,;:!]|[.,;\s])+\Z")


def _without_wrappers(text: str) -> str:
    """Returns the text without the delimiters of mathematics around it, a box, and punctuation behind it."""
    text = _REPEATING_DECIMAL.sub(r"\1\\overline{\2}", text)
    previous = None
    while text != previous:
        previous = text
        text = _without_one_wrapper(text)
    text = re.sub(r"(?<!\\)\\\Z", "", text)  # what is left of a space command at the end
    if text.count("$") - text.count(r"\$") >= 2:
        text = re.sub(r"(?<!\\)\$", " ", text)
    return text


def _without_one_wrapper(text: str) -> str:
    text = text.strip()
    equation = _EQUATION.fullmatch(text)
    if equation is not None and r"\\" not in equation[2]:
        return equation[2].replace("&", " ").strip()
    for opening, closing in _DELIMITERS:
        is_wrapped = text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing)
        if is_wrapped and opening not in text[len(opening) : -len(closing)]:
            inner = text[len(opening) : -len(closing)].strip()
            return inner if not inner.endswith("\\") or closing != "$" else text
    group = re.match(r"(?:\\(?:boxed|fbox)\s*)?(?=\{)", text)
    boxed = r"\boxed" + text[group.end() :] if group else ""
    if boxed and last_boxed_span(boxed) == (len(r"\boxed{"), len(boxed) - 1):
        return boxed[len(r"\boxed{") : -1].strip()
    shorter = _TRAILING_PUNCTUATION.sub("", text)
    return text if shorter.endswith("\\") else shorter


def _split(nodes: Sequence[Node], sign: str) -> list[list[Node]]:
    parts: list[list[Node]] = [[]]
    for node in nodes:
        if is_sign(node, sign):
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def _read_part(nodes: list[Node]) -> Statement:
    r"""Reads what stands on one side of `=`; of `A \approx B` both values and the first unit count."""
    sides = [_read_quantity(side) for side in _split(nodes, r"\approx")]
    if len(sides) == 1:
        return sides[0]
    if not sides[0].value or is_name(sides[0].value):
        sides = sides[1:]
    units = [side.unit for side in sides if side.unit is not None]
    return Statement(r"\approx ".join(side.value for side in sides), units[0] if units else None)


def _read_quantity(nodes: list[Node]) -> Statement:
    money = _money(nodes)
    if money is not None:
        return money
    for place in range(max(1, len(nodes) - _LONGEST_UNIT), len(nodes)):
        if not may_be_in_a_unit(nodes[place]) or nodes[place - 1] == Token("sign", "^"):
            continue
        value = nodes[:place]
        behind = nodes[place:]
        unit = read_unit(behind)
        if unit is None or value_of_nodes(_without_degrees(value)) is None:
            continue
        if is_ambiguous(behind):
            return Statement(_text(nodes), None, (_text(value), unit))
        return Statement(_text(value), unit)
    compound = _compound(nodes)
    if compound is not None:
        return compound
    return _algebra_with_unit(nodes)


def _text(nodes: Sequence[Node]) -> str:
    return written(_without_degrees(nodes))


def _without_degrees(nodes: Sequence[Node]) -> list[Node]:
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_without_degrees(node.body)), node.spaced))
        elif not is_sign(node, DEGREE):
            result.append(node)
    return result


def _money(nodes: list[Node]) -> Statement | None:
    r"""Reads `\$5`, `-\$5`, `US\$ 5` and `\$5 \text{ per kg}`, `\$5/kg`."""
    start = 1 if nodes and (is_sign(nodes[0], "-") or text_of(nodes[0]) == "US") else 0
    if len(nodes) <= start + 1 or not is_currency(nodes[start]):
        return None
    if is_sign(nodes[start + 1], "."):  # `Rs. 500`
        nodes = [*nodes[: start + 1], *nodes[start + 2 :]]
    currency = read_unit([nodes[start]])
    sign = [nodes[0]] if is_sign(nodes[0], "-") else []
    amount = [*sign, *nodes[start + 1 :]]
    for place, node in enumerate(amount):
        price = read_unit([nodes[start], *amount[place:]]) if is_sign(node, "/") or text_of(node) == "per" else None
        if price is not None and value_of_nodes(amount[:place]) is not None:
            return Statement(written(amount[:place]), price)
    inner = _read_quantity(amount)
    if currency is None or value_of(inner.value) is None:
        return None
    if inner.unit is None or inner.unit.powers == currency.powers:
        return Statement(inner.value, currency)
    return Statement(inner.value, inner.unit.times(currency, 1))


_ARC = {"'": "arcmin", '"': "arcsec"}
_FEET = {"'": "ft", '"': "in"}


def _compound(nodes: list[Node]) -> Statement | None:
    r"""Reads `2 h 30 min`, `5 ft 3 in` and `60^\circ 30'` as one value in the first unit."""
    segments = _segments(nodes)
    if len(segments) < 2:
        return None
    names = _ARC if any(is_sign(node, DEGREE) for node in nodes) else _FEET
    if any(text_of(node) in ("h", "hr") for node in nodes):
        names = {"m": "min"}
    quantities: list[tuple[str, Unit]] = []
    for number, behind in segments:
        renamed = [_renamed(node, names) for node in behind]
        unit = read_unit(renamed)
        if unit is None or value_of(number) is None or unit.offset or not unit.powers:
            return None
        quantities.append((number, unit))
    first = quantities[0][1]
    text = quantities[0][0]
    for number, unit in quantities[1:]:
        share = unit.factor / first.factor
        if unit.powers != first.powers or unit.radians or share >= 1:
            return None
        text += rf"+{number}\cdot\frac{{{share.numerator}}}{{{share.denominator}}}"
    return Statement(text, first)


def _renamed(node: Node, names: dict[str, str]) -> Node:
    if isinstance(node, Token) and node.text in names:
        return Token("letters", names[node.text], True, True)
    return node


def _segments(nodes: list[Node]) -> list[tuple[str, list[Node]]]:
    """Splits nodes into numbers, each with what stands behind it; `and` and commas between them are dropped."""
    segments: list[tuple[str, list[Node]]] = []
    for node in nodes:
        if is_number(node) and not (segments and segments[-1][1] and is_sign(segments[-1][1][-1], "^")):
            segments.append((text_of(node), []))
        elif not segments:
            return []
        elif not is_sign(node, ",") and text_of(node) != "and":
            segments[-1][1].append(node)
    if any(not behind for _, behind in segments):
        return []
    return segments


_STATEMENTS = (r"\angle", r"\cong", r"\sim", r"\parallel", r"\perp", r"\triangle", r"\infty", r"\in", r"\begin")
"""Commands of texts that are no quantities; a list has the units of its parts."""


def _algebra_with_unit(nodes: list[Node]) -> Statement:
    r"""Reads `2x + 3 \text{ cm}`: behind algebra, a unit must be upright and known, or a degree sign."""
    words = [node for node in nodes if isinstance(node, Token) and node.kind == "letters" and node.upright]
    if any(is_sign(node, ",", ";", *_STATEMENTS) or text_of(node) in ("and", "or") for node in nodes):
        return Statement(_text(nodes))
    for place in range(max(1, len(nodes) - _LONGEST_UNIT), len(nodes)):
        if not may_be_in_a_unit(nodes[place]) or is_sign(nodes[place], DEGREE):
            continue
        has_words = any(word in nodes[:place] for word in words)
        unit = None if has_words else read_unit(nodes[place:], after_letters=True)
        if unit is not None and not is_sign(nodes[place - 1], "^", "_", "+", "-", "=", ",", "(", r"\frac", r"\sqrt"):
            return Statement(_text(nodes[:place]), unit)
    return Statement(_text(nodes))


_SEVERAL = re.compile(r";|,(?!\d{3})|(?<![\\A-Za-z])(?:or|and)")  # spaces have been removed
_NOT_IN_A_NAME = re.compile(
    r"[+\-*/^<>,:;]|\\(?:frac|sqrt|pi|times|cdot|div|approx|pm|neq|leq?|geq?|lt|gt|begin|in|cup)(?![A-Za-z])"
)


def _value_of_equation(parts: list[list[Node]], statements: list[Statement]) -> Statement:
    r"""`m\\angle A = 2 \\cdot 30 = 60` -> `60`, `60 = x` -> `60`; `2x = 60` and several statements are unchanged."""
    texts = [_text(part) for part in parts]
    values = [statement.value for statement in statements]
    whole = Statement("=".join(values))
    if any(map(_SEVERAL.search, texts[1:-1])):
        return Statement("=".join(texts))
    is_named = is_name(values[0]) or all(map(states_a_value, values))
    if states_a_value(values[-1]) and is_named:
        return statements[-1]
    if len(parts) == 2 and states_a_value(values[0]) and is_name(values[1]):
        return statements[0]
    return whole


def states_a_value(text: str) -> bool:
    r"""Returns whether a text in normal form is one number, or several joined by `\approx`."""
    return all(value_of(part.strip()) is not None for part in text.split(r"\approx"))


def is_name(text: str) -> bool:
    r"""Returns whether a text has a letter and no arithmetic: a variable, a segment, `m\angle A`, a word."""
    text = text.strip()
    return bool(re.search("[A-Za-z]", text)) and not text[0].isdigit() and not _NOT_IN_A_NAME.search(text)


def without_name(text: str) -> str:
    r"""Returns `2x+1` for `y=2x+1`; an equation of two names (`AB=CD`) stays as it is."""
    name, value = named_parts(text)
    is_product = len(name) == 1 and len(value) > 1 and not value.isupper()  # `F=ma`
    return value if name and value and (is_product or not is_name(value)) else text


def named_parts(text: str) -> tuple[str, str]:
    """Splits `x=5` into the name and the value; the name is empty if there is none."""
    name, sign, value = text.partition("=")
    return (name, value) if sign and is_name(name) and "=" not in value else ("", text)


def has_unit(statement: Statement) -> bool:
    """Returns whether a statement names a unit; `units` names none."""
    return statement.unit is not None and statement.unit != NO_UNIT
