"""Decides whether two answers are equal."""

from __future__ import annotations

import re
from fractions import Fraction

from cepo.answers.algebra import same_algebra, same_equation
from cepo.answers.choices import chosen_letters, letters_alone
from cepo.answers.datetimes import moment_of, same_moment
from cepo.answers.exact_numbers import PI, Real, multiplied, near, same_value
from cepo.answers.intervals import Interval, intervals_of, same_interval
from cepo.answers.numbers import value_of
from cepo.answers.quantities import Statement
from cepo.answers.statements import LONGEST_ANSWER, has_unit, read_statement, without_name
from cepo.answers.structures import parts_of, same_parts, without_parentheses, without_point_name
from cepo.answers.unit_table import STERLING, Unit

_NEAR_APPROXIMATION = 0.01
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_WORDS = re.compile(r"\\(?:cong|angle|sim|parallel|perp|triangle)(?![A-Za-z])|=|(?<![\\A-Za-z])[A-Za-z]{3,}")
_RELATION_OF_FIGURES = re.compile(r"\\(?:cong|parallel|perp|sim)(?![A-Za-z])")
_SEGMENT = re.compile(r"\\overline\{([A-Z]{2})\}")
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])i(?![A-Za-z])")
_OTHER_LETTERS = re.compile(r"(?<![\\A-Za-z])(?!i(?![A-Za-z]))[A-Za-z]")
_LENGTHS = [frozenset({("metre", power)}) for power in (1, 2, 3)]
_TEMPERATURE = frozenset({("kelvin", 1)})


def equal_answers(prediction: str, gold: str) -> bool:
    """Implements `cepo.answers.equality.answers_equal`, which catches what this raises."""
    if max(len(prediction), len(gold)) > LONGEST_ANSWER:
        return prediction.strip() == gold.strip() != ""
    if moment_of(gold) is not None:
        return same_moment(prediction, gold)
    predicted_moment = moment_of(prediction)
    if predicted_moment is not None and predicted_moment.is_date:
        return prediction.strip() == gold.strip()
    expected = read_statement(gold)
    if not expected.value:
        return False
    predicted = read_statement(prediction)
    letters = letters_alone(gold)
    if letters:  # not algebra, in which 1B would equal B
        return chosen_letters(prediction) == letters or predicted.value == expected.value
    if same_statement(predicted, expected):
        return True
    predicted_list = read_statement(prediction, commas=False)
    # Only a gold answer that is a list tells that `1,234` is a list.
    is_list = predicted_list != predicted and parts_of(expected.value) is not None
    return is_list and same_statement(predicted_list, expected)


def same_statement(prediction: Statement, gold: Statement) -> bool:
    """Returns whether two statements have the same value in the same or a convertible unit, or one without a unit."""
    if not prediction.value or not gold.value:
        return False
    prediction, gold = _as_quantities(prediction, gold)
    if not has_unit(prediction) or not has_unit(gold):
        return _same_without_unit(prediction, gold)
    assert prediction.unit is not None
    assert gold.unit is not None
    if _are_interchangeable(prediction.unit, gold.unit):
        return _same_text(prediction.value, gold.value)
    if prediction.unit.powers != gold.unit.powers:
        return False
    gold_value = value_of(gold.value)
    if gold_value is None:
        return False
    expected_value = gold.unit.in_basic_units(gold_value)
    predicted_values = [prediction.unit.in_basic_units(value) for value in stated_values(prediction.value)]
    return any(same_value(value, expected_value) for value in predicted_values)


def _as_quantities(prediction: Statement, gold: Statement) -> tuple[Statement, Statement]:
    """Reads the letter of `6s` as a unit if the other statement has one; that of `6m` also if the gold is a number."""
    if gold.as_quantity is not None and has_unit(prediction):
        gold = Statement(*gold.as_quantity)
    if prediction.as_quantity is not None:
        is_length = _is_length(prediction.as_quantity[1]) and value_of(gold.value) is not None
        if has_unit(gold) or is_length:
            prediction = Statement(*prediction.as_quantity)
    return prediction, gold


def _is_length(unit: Unit) -> bool:
    """Returns whether a unit is the metre, alone, squared or cubed; `12/m` is rather a quotient."""
    return unit.factor == 1 and unit.powers in _LENGTHS


def _are_interchangeable(first: Unit, second: Unit) -> bool:
    """Returns whether values in two units are compared without conversion, since both may mean the same unit.

    A degree sign may stand for any temperature scale, and the word pound for money.
    """
    if first == second:
        return True
    if _TEMPERATURE in (first.powers, second.powers) and (first.is_bare_degree or second.is_bare_degree):
        return True
    return (first.is_pound_in_words and second == STERLING) or (second.is_pound_in_words and first == STERLING)


def _same_without_unit(prediction: Statement, gold: Statement) -> bool:
    if gold.value.endswith("%") and has_unit(prediction):
        return False
    if _same_text(prediction.value, gold.value):
        return True
    return _same_angle(prediction, gold) or _same_angle(gold, prediction)


def _same_angle(in_degrees: Statement, in_radians: Statement) -> bool:
    r"""Returns whether one statement has a degree sign, the other a part of π and no unit, and both are one angle.

    The part of π is at most a full turn, since `10\pi` is rather a length or an area.
    """
    if in_degrees.unit is None or not in_degrees.unit.is_bare_degree or in_radians.unit is not None:
        return False
    angle = value_of(in_radians.value)
    if angle is None or r"\pi" not in in_radians.value or not abs(angle) <= 2 * PI:
        return False
    return any(same_value(multiplied(value, PI / 180), angle) for value in stated_values(in_degrees.value))


def _same_text(prediction: str, gold: str) -> bool:
    """Compares values in normal form."""
    if prediction == gold:
        return True
    gold_value = value_of(gold)
    if gold_value is not None:
        return _states_number(prediction, gold, gold_value)
    if value_of(prediction) is not None and parts_of(gold) is None and _WORDS.search(gold):
        return False
    prediction, gold = _without_names(prediction, gold)
    verdict = _same_structure(prediction, gold)
    if verdict is not None:
        return verdict
    if not _WORDS.search(gold):
        return same_algebra(prediction, gold)
    if _without_bars_of_segments(prediction).casefold() == _without_bars_of_segments(gold).casefold():
        return True
    return _is_equation(gold) and _is_equation(prediction) and same_equation(prediction, gold)


def _without_names(prediction: str, gold: str) -> tuple[str, str]:
    """Drops a name that only one of two texts has, of a value or of a point, and parentheses around either."""
    if "=" not in gold:
        prediction = without_name(prediction)
    elif "=" not in prediction:
        gold = without_name(gold)
    if gold.startswith("("):
        prediction = without_point_name(prediction)
    elif prediction.startswith("("):
        gold = without_point_name(gold)
    return without_parentheses(prediction), without_parentheses(gold)


def _without_bars_of_segments(text: str) -> str:
    r"""Returns `AB\cong CD` for `\overline{AB}\cong\overline{CD}`, without spaces.

    Only of a relation between figures: alone, `\overline{AB}` may be a complement, which differs from `AB`.
    """
    if not _RELATION_OF_FIGURES.search(text):
        return text
    return _SEGMENT.sub(r"\1", text).replace(" ", "")


def _is_equation(text: str) -> bool:
    """Returns whether a text is one equation between expressions, without words."""
    first_side, sign, second_side = text.partition("=")
    if not sign or not first_side or not second_side:
        return False
    return not _WORDS.search(first_side) and not _WORDS.search(second_side)


def _states_number(prediction: str, gold: str, gold_value: Real) -> bool:
    predicted_values = stated_values(prediction)
    if any(same_value(value, gold_value) for value in predicted_values):
        return True
    expression = without_name(prediction)
    if _is_of_imaginary_unit(expression):
        return same_algebra(expression, gold)
    # The question may ask for a percentage, so that 60 answers it as well as 60 %.
    if not gold.endswith("%") or "%" in prediction:
        return False
    percentage = multiplied(gold_value, Fraction(100))
    return any(same_value(value, percentage) for value in predicted_values)


def _is_of_imaginary_unit(text: str) -> bool:
    r"""Returns whether a text computes with i and no other letters, as `i^2` and `(1+i)(1-i)` do."""
    return bool(_IMAGINARY.search(text)) and not _OTHER_LETTERS.search(text) and not _WORDS.search(text)


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


def _same_structure(prediction: str, gold: str) -> bool | None:
    """Compares intervals, lists, tuples, sets, matrices and ratios part by part; None if math-verify may know better."""
    intervals = intervals_of(gold)
    predicted_intervals = intervals_of(prediction)
    parts = parts_of(gold)
    if intervals and predicted_intervals:
        if _same_intervals(predicted_intervals, intervals):
            return True
        # `[1, 2]` may be a tuple as well, so that its parts may be equal as such.
        return None if parts is not None and len(intervals) == len(predicted_intervals) else False
    predicted_parts = parts_of(prediction)
    if predicted_parts is None:
        return None
    if parts is not None:
        return same_parts(predicted_parts, parts, _same_part)
    if intervals and predicted_parts.kind in ("list", "set"):
        return False  # math-verify would compare 1, 3 with the ends of 1 < x < 3
    return None


def _same_intervals(predicted_intervals: tuple[Interval, ...], intervals: tuple[Interval, ...]) -> bool:
    """Returns whether two unions have the same intervals in any order."""
    if len(intervals) != len(predicted_intervals):
        return False
    unmatched = list(intervals)
    for predicted in predicted_intervals:
        equal_intervals = [interval for interval in unmatched if same_interval(predicted, interval, _same_part)]
        if not equal_intervals:
            return False
        unmatched.remove(equal_intervals[0])
    return True


def _same_part(prediction: str, gold: str) -> bool:
    return same_statement(read_statement(prediction), read_statement(gold))
