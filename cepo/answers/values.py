"""Values of answers as keys and floats, and their roundings: for grouping equal answers and choosing wrong ones."""

from __future__ import annotations

import re

from cepo.answers.comparison import equal, stated_values
from cepo.answers.exact_numbers import Real, as_float, near, twelve_digits
from cepo.answers.numbers import value_of
from cepo.answers.statements import LONGEST_ANSWER, has_unit, read_statement

_ROUNDING_LIMIT = 0.05
"""The largest relative difference between a number and its rounding."""
_PLAIN_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")


def normal_form(text: str) -> str:
    r"""Returns the normal form of an answer's value: `x = 60^\circ` and `60 \text{ cm}^2` both become `60`.

    Drops units, a name before `=`, fonts, outer delimiters and boxes, a trailing period and thousands separators; writes
    every fraction as `\frac{a}{b}`, every root as `\sqrt{a}`, and `1.6e-19` as `1.6\cdot10^{-19}`. It computes no values:
    `\frac{6}{4}` is unchanged. It is idempotent.
    """
    return read_statement(text).value


def value_key(answer: str) -> str:
    r"""Returns a key that is equal for answers of equal value, such as `1/2`, `0.5` and `50\%`.

    Numbers are compared to 12 significant digits and without their units, other answers by their spelling.
    """
    if len(answer) > LONGEST_ANSWER:
        return answer.strip()
    spelling = read_statement(answer).value
    values = stated_values(spelling)
    return twelve_digits(values[-1]) if values else spelling.casefold()


def decimal_value(text: str) -> float | None:
    r"""Returns the value of a text that states one number (B for `A \\approx B`) as a float, or None for anything else."""
    if len(text) > LONGEST_ANSWER:
        return None
    values = stated_values(read_statement(text).value)
    return as_float(values[-1]) if values else None


def states_the_same(answer: str, truth: str) -> bool:
    r"""Returns whether an answer states the truth or a rounding of it, or the reverse: `8.7` for `5 \sqrt { 3 }`.

    This is looser than `equal`, which decides the reward. It is used to choose wrong answers for teachers.
    """
    return equal(answer, truth) or is_rounding(answer, truth)


def is_rounding(first: str, second: str) -> bool:
    """Returns whether one of two numbers is a decimal obtained by rounding or truncating the other to its places.

    Numbers that differ by more than 5 % are not roundings of each other, so 0 is not a rounding of 0.4. Neither are two
    different integers, or quantities in different units.
    """
    if max(len(first), len(second)) > LONGEST_ANSWER:
        return False
    first_statement = read_statement(first)
    second_statement = read_statement(second)
    have_units = has_unit(first_statement) and has_unit(second_statement)
    if have_units and first_statement.unit != second_statement.unit:
        return False
    first_value = value_of(first_statement.value)
    second_value = value_of(second_statement.value)
    if first_value is None or second_value is None or not near(first_value, second_value, _ROUNDING_LIMIT):
        return False
    return _is_decimal_of(first_statement.value, first_value, second_value) or _is_decimal_of(
        second_statement.value, second_value, first_value
    )


def _is_decimal_of(text: str, value: Real, exact: Real) -> bool:
    """Returns whether a text is a decimal whose value is the exact one, rounded or truncated to its places."""
    if not _PLAIN_DECIMAL.fullmatch(text):
        return False
    num_decimals = len(text.partition(".")[2])
    last_place = 10**-num_decimals
    lost = abs(exact) - abs(value)
    is_rounded = abs(lost) <= last_place * (1 + 1e-9) / 2
    is_truncated = 0 <= lost < last_place * (1 - 1e-9)
    return is_rounded or is_truncated
