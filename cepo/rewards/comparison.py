"""Decides whether two answers are equal."""

from __future__ import annotations

import re
from fractions import Fraction

from cepo.rewards.algebra import same_algebra, same_equation
from cepo.rewards.choices import chosen_letters, letters_alone
from cepo.rewards.moments import moment_of, same_moment
from cepo.rewards.numbers import PI, Real, near, same_value, scaled, value_of
from cepo.rewards.statements import LONGEST_ANSWER, Statement, has_unit, read_statement, without_name
from cepo.rewards.structures import (
    intervals_of,
    parts_of,
    same_interval,
    same_parts,
    without_parentheses,
    without_point_name,
)
from cepo.rewards.units import Unit, known_unit

_NEAR_APPROXIMATION = 0.01
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_WORDS = re.compile(r"\\(?:cong|angle|sim|parallel|perp|triangle)(?![A-Za-z])|=|(?<![\\A-Za-z])[A-Za-z]{3,}")
_STERLING = known_unit("£")


def equal_answers(prediction: str, gold: str) -> bool:
    """Implements `cepo.rewards.answers.answers_equal`, which catches what this raises."""
    if max(len(prediction), len(gold)) > LONGEST_ANSWER:
        return prediction.strip() == gold.strip() != ""
    moments = (moment_of(prediction), moment_of(gold))
    if moments[1] is not None:
        return same_moment(prediction, gold)
    if moments[0] is not None and moments[0].is_date:
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
    pair = read_statement(prediction, commas=False)
    # Only a gold answer that is a list tells that `1,234` is a list.
    return pair != predicted and parts_of(expected.value) is not None and same_statement(pair, expected)


def same_statement(prediction: Statement, gold: Statement) -> bool:
    """Returns whether two statements have the same value in the same or a convertible unit, or one without a unit."""
    if not prediction.value or not gold.value:
        return False
    prediction, gold = _as_quantities(prediction, gold)
    if not has_unit(prediction) or not has_unit(gold):
        return _same_without_unit(prediction, gold)
    assert prediction.unit is not None
    assert gold.unit is not None
    is_temperature = any(unit.powers == frozenset({("kelvin", 1)}) for unit in (prediction.unit, gold.unit))
    is_degree = prediction.unit.is_bare_degree or gold.unit.is_bare_degree
    if prediction.unit == gold.unit or (is_temperature and is_degree):
        return _same_text(prediction.value, gold.value)
    if _are_pounds(prediction.unit, gold.unit):
        return _same_text(prediction.value, gold.value)
    if prediction.unit.powers != gold.unit.powers:
        return False
    wanted = value_of(gold.value)
    if wanted is None:
        return False
    wanted = gold.unit.in_basic_units(wanted)
    return any(same_value(prediction.unit.in_basic_units(value), wanted) for value in stated_values(prediction.value))


def _as_quantities(prediction: Statement, gold: Statement) -> tuple[Statement, Statement]:
    """Reads the letter of `6s` as a unit if the other statement has one; that of `6m` also if the gold is a number."""
    if gold.as_quantity is not None and has_unit(prediction):
        gold = Statement(*gold.as_quantity)
    if prediction.as_quantity is not None:
        is_length = _is_length(prediction.as_quantity[1]) and value_of(gold.value) is not None
        if has_unit(gold) or is_length:
            prediction = Statement(*prediction.as_quantity)
    return prediction, gold


def _are_pounds(first: Unit, second: Unit) -> bool:
    """Returns whether one unit is the word pound, which may stand for money, and the other the pound of money."""
    return (first.is_pound_in_words and second == _STERLING) or (second.is_pound_in_words and first == _STERLING)


def _is_length(unit: Unit) -> bool:
    """Returns whether a unit is the metre, alone, squared or cubed."""
    return unit.factor == 1 and {name for name, _ in unit.powers} == {"metre"}


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
    return any(same_value(scaled(value, PI / 180), angle) for value in stated_values(in_degrees.value))


def _same_text(prediction: str, gold: str) -> bool:
    """Compares values in normal form."""
    if prediction == gold:
        return True
    wanted = value_of(gold)
    if wanted is not None:
        return _states_number(prediction, gold, wanted)
    if value_of(prediction) is not None and parts_of(gold) is None and _WORDS.search(gold):
        return False
    if "=" not in gold:
        prediction = without_name(prediction)
    elif "=" not in prediction:
        gold = without_name(gold)
    if gold[:1] == "(":
        prediction = without_point_name(prediction)
    elif prediction[:1] == "(":
        gold = without_point_name(gold)
    prediction = without_parentheses(prediction)
    gold = without_parentheses(gold)
    verdict = _same_structure(prediction, gold)
    if verdict is not None:
        return verdict
    if _WORDS.search(gold):
        is_spelled_alike = prediction.casefold() == gold.casefold()
        return is_spelled_alike or (_is_equation(gold) and _is_equation(prediction) and same_equation(prediction, gold))
    return same_algebra(prediction, gold)


def _is_equation(text: str) -> bool:
    """Returns whether a text is one equation between expressions, without words."""
    left, sign, right = text.partition("=")
    return bool(sign and left and right) and not _WORDS.search(left) and not _WORDS.search(right)


def _states_number(prediction: str, gold: str, wanted: Real) -> bool:
    if any(same_value(value, wanted) for value in stated_values(prediction)):
        return True
    # The question may ask for a percentage, so that 60 answers it as well as 60 %.
    if not gold.endswith("%") or "%" in prediction:
        return False
    hundredfold = scaled(wanted, Fraction(100))
    return any(same_value(value, hundredfold) for value in stated_values(prediction))


def stated_values(text: str) -> list[Real]:
    r"""Returns the values of a text in normal form: one, or both sides of `A \approx B` if they are near; else none."""
    sides = _APPROXIMATELY.split(text)
    values = [value_of(side.strip()) for side in sides]
    known = [value for value in values if value is not None]
    if len(known) != len(sides) or len(sides) > 2:
        return []
    if len(known) == 2 and not near(known[0], known[1], _NEAR_APPROXIMATION):
        return []
    return known


def _same_structure(prediction: str, gold: str) -> bool | None:
    """Compares intervals, lists, tuples, sets, matrices and ratios part by part; None if math-verify may know better."""
    intervals = intervals_of(gold)
    predicted_intervals = intervals_of(prediction)
    if intervals and predicted_intervals:
        if len(intervals) != len(predicted_intervals):
            return False
        left = list(intervals)
        for interval in predicted_intervals:
            equals = [other for other in left if same_interval(interval, other, _same_part)]
            if not equals:
                return None if parts_of(gold) is not None else False
            left.remove(equals[0])
        return True
    parts = parts_of(gold)
    predicted_parts = parts_of(prediction)
    if intervals and predicted_parts is not None and predicted_parts.kind in ("list", "set") and parts is None:
        return False  # math-verify would compare 1, 3 with the ends of 1 < x < 3
    if parts is None or predicted_parts is None:
        return None
    return same_parts(predicted_parts, parts, _same_part)


def _same_part(prediction: str, gold: str) -> bool:
    return same_statement(read_statement(prediction), read_statement(gold))
