"""Compares the final answer of a response with the ground truth.

`docs/rewards.md` has the table of spellings. The modules beside this one each have a part: `extraction` finds the
answer, `wrappers`, `tokens`, `typesetting`, `digits`, `fractions_and_roots`, `environments`, `angles`, `spelling` and
`writing` give it its normal form,
`statements`, `quantities` and `units` split it into a value and a unit, `numbers` and `reals` compute the value,
`moments` reads dates and times, `structures`, `intervals`, `choices`, `algebra` and `comparison` compare.

These functions have no timeout: reading and comparing is bounded by `magnitude`, but simplifying a relation may take
long. Training calls them in the worker processes of `cepo.rewards.pool`, which are killed after a time limit.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from cepo.answers.comparison import equal_answers, stated_values
from cepo.answers.exact_numbers import Real, as_float, floating, near, twelve_digits
from cepo.answers.extraction import extract_answer
from cepo.answers.numbers import value_of
from cepo.answers.statements import LONGEST_ANSWER, has_unit, read_statement

__all__ = [
    "answers_equal", "decimal_value", "extract_answer", "is_numeric_answer", "is_rounding", "normalise_answer",
    "states_the_same", "value_key",
]  # fmt: skip

logger = logging.getLogger(__name__)

ROUNDING_LIMIT = 0.05
"""The largest relative difference between a number and its rounding."""
_PLAIN_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")


def normalise_answer(text: str) -> str:
    r"""Returns the normal form of an answer's value: `x = 60^\circ` and `60 \text{ cm}^2` both become `60`.

    Drops units, a name before `=`, fonts, outer delimiters and boxes, a trailing period, thousands separators and
    spaces; writes every fraction as `\frac{a}{b}`, every root as `\sqrt{a}`, and `1.6e-19` as `1.6\cdot10^{-19}`. It
    computes no values: `\frac{6}{4}` is unchanged. It is idempotent.
    """
    return read_statement(text).value


def answers_equal(prediction: str, ground_truth: str) -> bool:
    r"""Returns whether both texts state the same answer. It never raises.

    Both sides are read as a value and a unit (`cepo.answers.statements`). Units must be equal or convertible; a unit that
    only one side names does not count. Values that are numbers are compared exactly, or to 40 digits if they are
    irrational: no rounding is equal. A prediction that is not a single number (an equation, a set, words) never equals
    a number, but an expression in i alone is computed: `i^2` equals -1. Lists, tuples, sets, intervals, inequalities and
    matrices are compared part by part. A gold answer in words (`\angle 1 \cong \angle 4`) or an equation is compared by
    spelling; other algebra by its values at three points.

    A percentage equals its fraction: `60\%`, `0.6` and `\frac{3}{5}` are equal. The prediction `60` also equals a gold
    `60\%`, because the question may name the unit, but `60\%` does not equal a gold `60`.

    A prediction `A \approx B` is right if A or B is, provided that A and B differ by at most 1 %. Texts of more than
    512 characters are compared as they are.
    """
    try:
        return equal_answers(prediction, ground_truth)
    except Exception:
        # math-verify and sympy raise all kinds of errors for odd expressions; none of them makes an answer right.
        logger.debug("An answer could not be compared, so that it counts as wrong.", exc_info=True)
        return False


def states_the_same(prediction: str, ground_truth: str) -> bool:
    r"""Returns whether a text states the right answer or a rounding of it, or the reverse: `8.7` for `5 \sqrt { 3 }`.

    This is looser than `answers_equal`, which decides the reward. It is used to choose wrong answers for teachers.
    """
    return answers_equal(prediction, ground_truth) or is_rounding(prediction, ground_truth)


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
    if first_value is None or second_value is None or not near(first_value, second_value, ROUNDING_LIMIT):
        return False
    return _is_decimal_of(first_statement.value, first_value, second_value) or _is_decimal_of(
        second_statement.value, second_value, first_value
    )


def _is_decimal_of(text: str, value: Real, exact: Real) -> bool:
    """Returns whether a text is a decimal whose value is the exact one, rounded or truncated to its places."""
    if not _PLAIN_DECIMAL.fullmatch(text):
        return False
    num_decimals = len(text.partition(".")[2])
    last_place = floating(Fraction(1, 10**num_decimals))
    lost = abs(floating(exact)) - abs(floating(value))
    is_rounded = abs(lost) <= last_place * (1 + 1e-9) / 2
    is_truncated = 0 <= lost < last_place * (1 - 1e-9)
    return is_rounded or is_truncated


def is_numeric_answer(text: str) -> bool:
    r"""Returns whether a text states one number, such as `60^\circ`, `2:3` or `5 \sqrt { 3 }`."""
    return len(text) <= LONGEST_ANSWER and value_of(read_statement(text).value) is not None


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
