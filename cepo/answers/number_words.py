"""Numbers in words at the beginning of an answer: `seven years`, `Twenty-one`, `二十`, `三个`, `百分之二十`."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

from cepo.answers.lexer import Node, Token, is_letters, is_sign, text_of, word_of
from cepo.answers.tables import UNITS
from cepo.answers.unit_table import counts_things, known_unit

_SMALL: list[str] = UNITS["small_numbers"].split()
_TENS: list[str] = UNITS["tens"].split()
_VALUES = {
    **dict(zip(_SMALL, range(20), strict=True)),
    **dict(zip(_TENS, range(20, 100, 10), strict=True)),
}
_NUMERALS = "零一二两三四五六七八九十"
_CHINESE = re.compile(rf"(?P<percent>百分之)?(?P<numerals>[{_NUMERALS}][{_NUMERALS}百千万亿]*)(?P<unit>.*)")
_NO_NUMBER = re.compile(r"[一二两三四五六七八九]{2}|[百千万亿][一二两三四五六七八九]$|^零.")
"""Numerals that are read digit by digit (`一九八四`), or whose last digit may count tens or more (`二百五`)."""
_ANOTHER_NUMBER = {*_VALUES, "point", "per", "am", "pm"}
"""Words behind a number that begin another part of it, or make it another quantity."""


def with_digits(nodes: list[Node]) -> list[Node]:
    """Writes the number with which an answer begins in digits, if a word, a percent sign or nothing follows it."""
    if not nodes or not is_letters(nodes[0]):
        return nodes
    if not text_of(nodes[0]).isascii():
        return [*_chinese_number(nodes[0]), *nodes[1:]]
    number = _english_number(nodes)
    if number is None:
        return nodes
    value, length = number
    behind = nodes[length:]
    is_alone = not behind or is_sign(behind[0], "%") or is_letters(behind[0])
    if not is_alone or not _ANOTHER_NUMBER.isdisjoint(map(word_of, behind)):
        return nodes
    return [Token("number", str(value), nodes[0].spaced), *behind]


def _english_number(nodes: list[Node]) -> tuple[int, int] | None:
    """Returns the value of the number words at the beginning and how many nodes they are; None if there are none."""
    value = _VALUES.get(word_of(nodes[0]))
    if value is None:
        return None
    if value >= 20:
        place = 2 if len(nodes) > 2 and is_sign(nodes[1], "-") else 1
        units = _VALUES.get(word_of(nodes[place]), 0) if place < len(nodes) else 0
        if 0 < units < 10:
            return value + units, place + 1
    return value, 1


def _chinese_number(node: Node) -> list[Node]:
    """Returns the number, percent sign and unit of `二十米`; the node alone if it is another word, as in `一次函数`."""
    match = _CHINESE.fullmatch(text_of(node))
    if match is None or _NO_NUMBER.search(match["numerals"]):
        return [node]
    unit = known_unit(match["unit"])
    is_counter = len(match["unit"]) == 1 or (unit is not None and not counts_things(unit))
    if match["unit"] and (unit is None or not is_counter):
        return [node]
    result: list[Node] = [Token("number", str(_value_of_numerals(match["numerals"])), node.spaced)]
    if match["percent"]:
        result.append(Token("sign", "%"))
    if match["unit"] and isinstance(node, Token):
        result.append(replace(node, text=match["unit"]))
    return result


def _value_of_numerals(numerals: str) -> int:
    total = 0
    section = 0
    digit = 0
    for numeral in numerals.replace("两", "二"):
        value = int(unicodedata.numeric(numeral))
        if value < 10:
            digit = value
        elif value < 10_000:
            section += (digit or 1) * value
            digit = 0
        else:
            total = (total + section + digit) * value
            section = digit = 0
    return total + section + digit
