"""Decides from an answer's text whether it is too long to be read, or too costly for math-verify."""

from __future__ import annotations

import math
import re

LARGEST_EXPONENT = 10_000
LONGEST_EXPRESSION = 200
DEEPEST_NESTING = 8
MOST_SEPARATORS = 16
_LARGEST_POWER_OF_BRACKETS = 2  # log10
_LARGEST_LOG10_OF_POWER = 10
_LONGEST_FLOAT = 300
_LONGEST_FACTORIAL = 4  # digits
_MOST_LONG_FACTORIALS = 3
_FACTORIAL = re.compile(r"(\d+|[)}\]])\s*!")
_SEPARATOR = re.compile(r"[,;|&]")
_OPERATOR = re.compile(r"\\(?:i+nt|oint|sum|prod|lim|binom|tbinom|dbinom)(?![A-Za-z])")
_POWER_OF_BRACKETS = re.compile(r"[)\]}]\s*\^")
_POWER = re.compile(r"\^")
_CHARACTER = re.compile(r"\S?")
_POWER_BEHIND = re.compile(r"[\s)}]*\^")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


_DEPTH_CHANGES = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def is_too_long(text: str) -> bool:
    """Returns whether an expression has more than 200 characters or brackets nested more than 8 deep."""
    if len(text) > LONGEST_EXPRESSION:
        return True
    depth = 0
    for character in text:
        depth += _DEPTH_CHANGES.get(character, 0)
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
    powers_of_brackets = [_log10(_exponent(text, match.end())) for match in _POWER_OF_BRACKETS.finditer(text)]
    if any(power > _LARGEST_POWER_OF_BRACKETS for power in powers_of_brackets):
        return True
    powers = [_log10(_exponent(text, match.end())) for match in _POWER.finditer(text)]
    if any(power > math.log10(LARGEST_EXPONENT) for power in powers):
        return True
    largest_power = max(powers, default=0.0)
    return _has_costly_factorials(text, largest_power)


def _has_costly_factorials(text: str, largest_power: float) -> bool:
    """Returns whether a text has a factorial of a large number or of a factorial, or several of large numbers.

    `largest_power` is the log10 of the largest exponent in the text.
    """
    num_long = 0
    for match in _FACTORIAL.finditer(text):
        text_before = text[: match.start()]
        behind = text[match.end() :].lstrip()
        operand = match[1]  # digits, or the bracket that closes the operand
        if behind.startswith("!") or len(operand) > _LONGEST_FACTORIAL:
            return True
        if len(operand) == _LONGEST_FACTORIAL:
            num_long += 1
        if operand.isdigit():
            continue
        # What stands in the brackets is not computed: everything before them is an upper bound.
        if (
            "!" in text_before
            or _log10(text_before) > _LONGEST_FACTORIAL
            or largest_power > math.log10(_LONGEST_FACTORIAL)
        ):
            return True
    return num_long > _MOST_LONG_FACTORIALS


def _exponent(text: str, start: int) -> str:
    """Returns the exponent that begins at `start`: the content of a group, or a number with its own exponent."""
    remaining = text[start:].lstrip()
    if not remaining.startswith(("{", "(")):
        number = _NUMBER.match(remaining) or _CHARACTER.match(remaining)
        assert number is not None
        behind = remaining[number.end() :].lstrip()
        if not behind.startswith("^"):
            return number[0]
        length_of_power = 1 + len(_exponent(behind, 1))
        return number[0] + behind[:length_of_power]
    depth = 0
    for position, character in enumerate(remaining):
        if character in "{(":
            depth += 1
        elif character in "})":
            depth -= 1
        if depth == 0:
            return remaining[1:position]
    return remaining[1:]


def _log10(exponent: str) -> float:
    """Returns an upper bound of the exponent's log10: that of the product of its numbers, each with its own exponent."""
    total = 0.0
    position = 0
    while True:
        number = _NUMBER.search(exponent, position)
        if number is None:
            return total
        size = math.log10(max(float(number[0]), 1.0)) if len(number[0]) < _LONGEST_FLOAT else math.inf
        position = number.end()
        power_sign = _POWER_BEHIND.match(exponent, position)
        if power_sign is not None:
            raised = _exponent(exponent, power_sign.end())
            size = _scaled(size, _log10(raised))
            position = power_sign.end() + len(raised)
        total += size


def _scaled(size: float, power: float) -> float:
    """Returns size * 10^power, infinite where that is large."""
    if power < _LARGEST_LOG10_OF_POWER:
        return size * 10**power
    return math.inf if size else 0.0
