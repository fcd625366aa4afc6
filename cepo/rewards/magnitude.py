"""Decides from an answer's text whether it is too long to be read, or too costly for math-verify."""

from __future__ import annotations

import math
import re

LARGEST_EXPONENT = 10_000
LONGEST_EXPRESSION = 200
DEEPEST_NESTING = 8
MOST_SEPARATORS = 16
_LONGEST_FACTORIAL = 4
_MOST_LONG_FACTORIALS = 3
_FACTORIAL = re.compile(r"(\d+|[)}\]])\s*!")
_SEPARATOR = re.compile(r"[,;|&]")
_OPERATOR = re.compile(r"\\(?:i+nt|oint|sum|prod|lim|binom|tbinom|dbinom)(?![A-Za-z])")
_POWER_OF_BRACKETS = re.compile(r"[)\]}]\s*\^")
_POWER = re.compile(r"\^")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def is_too_long(text: str) -> bool:
    """Returns whether an expression has more than 200 characters or brackets nested more than 8 deep."""
    if len(text) > LONGEST_EXPRESSION:
        return True
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth > DEEPEST_NESTING:
            return True
    return False


def is_too_costly(text: str) -> bool:
    """Returns True for algebra that `math_verify` may take minutes to parse or compare.

    These have more than 200 characters, brackets nested more than 8 deep, more than 16 separators, an integral, sum,
    product or limit, brackets to a power above 100, an exponent that contains a number, product or power above 10,000
    (`10^{10^9}`, `9^{9^{9^9}}`, `x^{123456789}`), a factorial like `99999!`, `9!!!`, `(9!)!`,
    or more than three like `9999!`.
    """
    if is_too_long(text) or len(_SEPARATOR.findall(text)) > MOST_SEPARATORS or _OPERATOR.search(text):
        return True
    if any(_logarithm(_exponent(text, found.end())) > 2 for found in _POWER_OF_BRACKETS.finditer(text)):
        return True
    if sum(len(found[1]) == _LONGEST_FACTORIAL for found in _FACTORIAL.finditer(text)) > _MOST_LONG_FACTORIALS:
        return True
    powers = [_logarithm(_exponent(text, found.end())) for found in _POWER.finditer(text)]
    for found in _FACTORIAL.finditer(text):
        if len(found[1]) > _LONGEST_FACTORIAL or text[found.end() :].lstrip().startswith("!"):
            return True
        before = text[: found.start()]
        if not found[1].isdigit() and ("!" in before or _logarithm(before) > _LONGEST_FACTORIAL):
            return True
        if not found[1].isdigit() and any(power > math.log10(_LONGEST_FACTORIAL) for power in powers):
            return True
    return any(power > math.log10(LARGEST_EXPONENT) for power in powers)


def _exponent(text: str, start: int) -> str:
    """Returns the exponent that begins at `start`: the content of a group, or a number with its own exponent."""
    rest = text[start:].lstrip()
    if not rest.startswith(("{", "(")):
        number = _NUMBER.match(rest) or re.match(r"\S?", rest)
        assert number is not None
        behind = rest[number.end() :].lstrip()
        return number[0] + behind[: 1 + len(_exponent(behind, 1))] if behind.startswith("^") else number[0]
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return rest[1:]


def _logarithm(exponent: str) -> float:
    """Returns an upper bound of the exponent's log10: the product of its numbers, each with its own exponent."""
    total, position = 0.0, 0
    while found := _NUMBER.search(exponent, position):
        size = math.log10(max(float(found[0]), 1.0)) if len(found[0]) < 300 else math.inf
        position = found.end()
        behind = re.compile(r"[\s)}]*\^").match(exponent, position)
        if behind is not None:
            raised = _exponent(exponent, behind.end())
            power = _logarithm(raised)
            size = size * 10**power if power < 10 else (math.inf if size else 0.0)
            position = behind.end() + len(raised)
        total += size
    return total
