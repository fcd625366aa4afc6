"""Equality of two answers: the one comparison that every reward uses."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from cepo.answers.algebra import same_algebra, same_equation
from cepo.answers.choices import chosen, letters_of_truth, same_letters_together
from cepo.answers.datetimes import date_of, ends_of_time_range, same_date, same_time, time_of
from cepo.answers.exact_numbers import PI, Real, as_float, near, same_value
from cepo.answers.literals import (
    formula_of,
    is_positive_difference,
    order_of,
    range_of,
    same_telephone_number,
    size_of,
    telephone_number_of,
)
from cepo.answers.numbers import value_of
from cepo.answers.statements import (
    LONGEST_ANSWER,
    Statement,
    folded,
    folded_name,
    has_unit,
    read_statement,
    with_multiple,
    without_name,
)
from cepo.answers.structures import (
    is_inequality,
    parts_of,
    same_parts,
    without_parentheses,
    without_point_name,
)
from cepo.answers.unit_table import BARE_DEGREE, Unit, same_things

logger = logging.getLogger(__name__)

_NEAR_APPROXIMATION = 0.01
_SLACK = 1 + 1e-9
"""A factor of tolerances, for numbers such as 2.094 that are not exact in binary."""
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_WORDS = re.compile(
    r"\\(?:cong|angle|sim|parallel|perp|triangle|begin)(?![A-Za-z])|=|(?<![\\A-Za-z])[A-Za-z]{3,}|[\u4e00-\u9fff]"
    r"|\d\.\d+\.\d"
)
"""Signs of a text that is no algebra: words, relations of geometry, and numbers such as `3.2.10` of a section or a version."""
_LETTERS_OF_A_WORD = re.compile(r"[A-Za-z][A-Za-z. ]*[A-Za-z][A-Za-z. ]*")
_LENGTHS = [frozenset({("metre", power)}) for power in (1, 2, 3)]


def equal(answer: str, truth: str, *, tolerance: float = 0.0, decimals: int | None = None) -> bool:
    r"""Returns whether an answer states the truth. It never raises.

    Dates, times of day, telephone numbers, ranges and chemical formulas are compared as such, choices (`B`, `A, C`) by
    their letters. All else is read as a value and a unit. Units must be equal or convertible; a unit that only one side
    names does not count. Then numbers are compared: to 980 digits, or within the tolerance that is
    given. An answer that is not a single number (an equation, a set, words) never equals a number.
    Lists, tuples, sets and intervals are compared part by part, words by spelling in any case, equations by spelling or
    as equations, and other algebra by its values at three points.

    A percentage equals its fraction: `60\%`, `0.6` and `\frac{3}{5}` are equal. A percent sign that only one side has
    does not count either, as the question may name it: `60\%` and `60` are equal, but `0.6\%` and `0.6` are not.

    An answer `A \approx B` is right if A or B is, provided that A and B differ by at most 1 %. Texts of more than 512
    characters are compared as they are.

    Args:
        answer: the answer of a response, without the box around it.
        truth: the right answer.
        tolerance: the largest difference of two equal numbers, in the unit of the truth.
        decimals: numbers are equal if they are when rounded to so many decimals.
    """
    try:
        return _equal(answer, truth, _Closeness(tolerance, decimals))
    except Exception:
        # math-verify and sympy raise all kinds of errors for odd expressions; none of them makes an answer right.
        logger.debug("An answer could not be compared, so that it counts as wrong.", exc_info=True)
        return False


@dataclass(frozen=True)
class _Closeness:
    """How near to a right number a number must be."""

    tolerance: float = 0.0
    decimals: int | None = None

    def allows(self, value: Real, right_value: Real) -> bool:
        if same_value(value, right_value):
            return True
        number = as_float(value)
        right_number = as_float(right_value)
        if number is None or right_number is None:
            return False
        if self.decimals is not None and round(number, self.decimals) == round(right_number, self.decimals):
            return True
        return abs(number - right_number) <= self.tolerance * _SLACK and self.tolerance > 0


def _equal(answer: str, truth: str, closeness: _Closeness) -> bool:
    if answer.strip() == truth.strip():
        return bool(truth.strip())
    if max(len(answer), len(truth)) > LONGEST_ANSWER:
        return False
    verdict = _same_literal(answer, truth, closeness)
    if verdict is not None:
        return verdict
    expected = read_statement(truth)
    if not expected.value:
        return False
    stated = read_statement(answer)
    letters = letters_of_truth(truth)
    if letters:  # not algebra, in which 1B would equal B
        return chosen(answer) == letters or stated.value == expected.value
    if same_letters_together(answer, truth):
        return True
    comparison = _Comparison(closeness)
    if comparison.same_statement(stated, expected):
        return True
    stated_list = read_statement(answer, commas=False)
    # Only a right answer that is a list tells that `1,234` is a list.
    is_list = stated_list != stated and parts_of(expected.value) is not None
    return is_list and comparison.same_statement(stated_list, expected)


def _same_literal(answer: str, truth: str, closeness: _Closeness) -> bool | None:
    """Compares texts whose signs are no arithmetic; None if the truth is none of them and the answer may be arithmetic."""
    date = date_of(answer)
    right_date = date_of(truth)
    if right_date is not None:
        return date is not None and same_date(date, right_date)
    right_ends = ends_of_time_range(truth)
    if right_ends is not None:
        ends = ends_of_time_range(answer)
        return ends is not None and all(map(same_time, ends, right_ends))
    verdict = _same_time_of_day(answer, truth)
    if verdict is not None:
        return verdict
    if telephone_number_of(truth):
        return same_telephone_number(answer, truth)
    if order_of(truth):
        return order_of(answer) == order_of(truth)
    right_range = range_of(truth)
    stated_range = range_of(answer)
    if right_range is not None and (right_range.sign == "-" or stated_range is not None):
        return stated_range is not None and _same_quantities(stated_range.ends, right_range.ends, closeness)
    right_size = size_of(truth)
    if right_size:
        return _same_quantities(size_of(answer), right_size, closeness)
    right_formula = formula_of(truth)
    if right_formula:
        return formula_of(answer) == right_formula
    has_groups = bool(telephone_number_of(answer) or order_of(answer)) and not is_positive_difference(answer)
    is_range = stated_range is not None and not stated_range.is_arithmetic and stated_range.sign == "-"
    return False if date is not None or has_groups or is_range else None


def _same_time_of_day(answer: str, truth: str) -> bool | None:
    """Compares times of day; None if the truth is none, or if both may be ratios."""
    right_time = time_of(truth)
    time = time_of(answer)
    if right_time is None:
        return False if time is not None and time.is_certain else None
    if time is not None:
        return same_time(time, right_time)
    return False if right_time.is_no_reduced_ratio else None


def _same_quantities(stated: tuple[str, ...], expected: tuple[str, ...], closeness: _Closeness) -> bool:
    same = _Comparison(closeness).same_part
    return len(stated) == len(expected) and all(map(same, stated, expected))


@dataclass(frozen=True)
class _Comparison:
    """Compares statements and their parts, with numbers as near as the closeness says."""

    closeness: _Closeness

    def same_part(self, answer: str, truth: str) -> bool:
        """Returns whether two parts, such as the items of lists, state the same."""
        return self.same_statement(read_statement(answer), read_statement(truth))

    def same_statement(self, answer: Statement, truth: Statement) -> bool:
        """Returns whether two statements have the same value in the same or a convertible unit, or one without a unit."""
        if not answer.value or not truth.value:
            return False
        answer, truth = _as_quantities(answer, truth)
        if not has_unit(answer) or not has_unit(truth):
            return self._same_without_unit(answer, truth)
        assert answer.unit is not None
        assert truth.unit is not None
        if _are_interchangeable(answer.unit, truth.unit):
            return self._same_text(answer.value, truth.value)
        if answer.unit.powers != truth.unit.powers:
            return False
        right_value = value_of(truth.value)
        if right_value is None:
            return False
        for value in stated_values(answer.value):
            converted = truth.unit.from_basic_units(answer.unit.in_basic_units(value))
            if self.closeness.allows(converted, right_value):
                return True
        return False

    def _same_without_unit(self, answer: Statement, truth: Statement) -> bool:
        is_percent_of_a_unit = answer.value.endswith("%") and truth.unit is not None
        if is_percent_of_a_unit or (truth.value.endswith("%") and has_unit(answer)):
            return False
        if self._same_text(answer.value, truth.value):
            return True
        return _same_angle(answer, truth) or _same_angle(truth, answer)

    def _same_text(self, answer: str, truth: str) -> bool:
        """Compares values in normal form."""
        if answer == truth:
            return True
        if value_of(answer) is not None:
            truth = with_multiple(truth)
        right_value = value_of(truth)
        if right_value is not None:
            return self._states_number(with_multiple(answer), truth, right_value)
        if value_of(answer) is not None and parts_of(truth) is None and _WORDS.search(truth):
            return False
        answer, truth = _without_names(answer, truth)
        verdict = self._same_structure(answer, truth)
        if verdict is not None:
            return verdict
        if _LETTERS_OF_A_WORD.fullmatch(truth) and folded_name(answer) == folded_name(truth):
            return True
        if not _WORDS.search(truth):
            return same_algebra(answer, truth)
        if folded(answer) == folded(truth):
            return True
        return _is_equation(truth) and _is_equation(answer) and same_equation(answer, truth)

    def _states_number(self, answer: str, truth: str, right_value: Real) -> bool:
        """Returns whether an answer states the number, in percent if either side has the sign."""
        values = stated_values(answer)
        if any(self.closeness.allows(value, right_value) for value in values):
            return True
        has_percent = "%" in answer
        if has_percent == truth.endswith("%"):
            return False
        if has_percent:
            if abs(right_value) < 1:
                return False  # a part of a whole, whose percentage is another number
            return any(self.closeness.allows(value * 100, right_value) for value in values)
        return any(self.closeness.allows(value, right_value * 100) for value in values)

    def _same_structure(self, answer: str, truth: str) -> bool | None:
        """Compares lists, tuples, sets and ratios part by part; None if math-verify may know better."""
        parts = parts_of(answer)
        right_parts = parts_of(truth)
        if parts is not None and right_parts is not None:
            return same_parts(parts, right_parts, self.same_part)
        # math-verify would compare 1, 3 with the ends of 1 < x < 3
        listed = parts or right_parts
        is_listed = listed is not None and listed.kind in ("list", "set")
        return False if is_listed and (is_inequality(truth) or is_inequality(answer)) else None


def _as_quantities(answer: Statement, truth: Statement) -> tuple[Statement, Statement]:
    """Reads the letter of `6s` as a unit if the other statement has one; that of `6m` also if the truth is a number."""
    if truth.as_quantity is not None and has_unit(answer):
        truth = Statement(*truth.as_quantity)
    if answer.as_quantity is not None:
        is_length = _is_length(answer.as_quantity[1]) and value_of(truth.value) is not None
        if has_unit(truth) or is_length:
            answer = Statement(*answer.as_quantity)
    return answer, truth


def _is_length(unit: Unit) -> bool:
    """Returns whether a unit is the metre, alone, squared or cubed; `12/m` is rather a quotient."""
    return unit.factor == 1 and unit.powers in _LENGTHS


def _are_interchangeable(first: Unit, second: Unit) -> bool:
    """Returns whether values in two units are compared without conversion, since both may mean the same unit.

    A degree sign may stand for any temperature scale, the word pound for money, and ¥ for yen and yuan.
    """
    if first == second or same_things(first, second):
        return True
    return second in first.others or first in second.others


def _same_angle(in_degrees: Statement, in_radians: Statement) -> bool:
    r"""Returns whether one statement has a degree sign, the other a part of π and no unit, and both are one angle.

    The part of π is at most a full turn, since `10\pi` is rather a length or an area.
    """
    if in_degrees.unit != BARE_DEGREE or in_radians.unit is not None:
        return False
    angle = value_of(in_radians.value)
    if angle is None or r"\pi" not in in_radians.value or not abs(angle) <= 2 * PI:
        return False
    return any(same_value(value * PI / 180, angle) for value in stated_values(in_degrees.value))


def _without_names(answer: str, truth: str) -> tuple[str, str]:
    """Drops a name that only one of two texts has, of a value or of a point, and parentheses around either."""
    if "=" not in truth:
        answer = without_name(answer)
    elif "=" not in answer:
        truth = without_name(truth)
    if truth.startswith("("):
        answer = without_point_name(answer)
    elif answer.startswith("("):
        truth = without_point_name(truth)
    return without_parentheses(answer), without_parentheses(truth)


def _is_equation(text: str) -> bool:
    """Returns whether a text is one equation between expressions, without words."""
    first_side, sign, second_side = text.partition("=")
    if not sign or not first_side or not second_side:
        return False
    return not _WORDS.search(first_side) and not _WORDS.search(second_side)


def stated_values(text: str) -> list[Real]:
    r"""Returns the values of a text in normal form: one, or both sides of `A \approx B` if they are near; else none."""
    values: list[Real] = []
    for side in _APPROXIMATELY.split(text):
        value = value_of(side.strip())
        if value is None:
            return []
        values.append(value)
    if len(values) == 1:
        return values
    is_approximation = len(values) == 2 and near(values[0], values[1], _NEAR_APPROXIMATION)
    return values if is_approximation else []
