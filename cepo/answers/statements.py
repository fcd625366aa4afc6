r"""Reads an answer as a statement: a value in its normal form, and its unit.

statement = {name "="} quantity          `x = 2 \cdot 30 = 60` states 60

`quantities` reads one side of an equation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from cepo.answers.delimiters import without_wrappers
from cepo.answers.lexer import Group, Node, is_sign
from cepo.answers.numbers import value_of
from cepo.answers.quantities import Statement, read_quantity, text_without_degrees
from cepo.answers.spelling import nodes_of
from cepo.answers.unit_table import NO_UNIT

LONGEST_ANSWER = 512
"""The number of characters up to which an answer is read; longer ones are compared as they are."""
_MOST_PASSES = 8


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


_SEVERAL_STATEMENTS = re.compile(r";|,(?!\d{3})|(?<![\\A-Za-z])(?:or|and)")  # spaces have been removed
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
    if is_calculation or (is_name(first) and states_a_value(last)):
        return statements[-1]
    if len(sides) == 2 and states_a_value(first) and is_name(last):
        return statements[0]
    return Statement("=".join(values))


def states_a_value(text: str) -> bool:
    r"""Returns whether a text in normal form is one number, or several joined by `\approx`."""
    return all(value_of(part.strip()) is not None for part in text.split(r"\approx"))


def is_name(text: str) -> bool:
    r"""Returns whether a text has a letter and no arithmetic: a variable, a segment, `m\angle A`, a word."""
    text = text.strip()
    has_letter = re.search("[A-Za-z]", text) is not None
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


def has_unit(statement: Statement) -> bool:
    """Returns whether a statement names a unit; `units` names none."""
    return statement.unit is not None and statement.unit != NO_UNIT
