"""The real answers of Geometry3K: right values are right in every spelling, the other choices are wrong."""

from __future__ import annotations

import json
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cepo.rewards.math import compute_score

FOLDER = Path(os.environ.get("CEPO_GEO3K") or Path(__file__).parents[3] / "shared" / "data" / "geo3k")

pytestmark = pytest.mark.skipif(
    not (FOLDER / "meta.jsonl").is_file(),
    reason=f"no meta.jsonl in {FOLDER}; name the folder of Geometry3K in CEPO_GEO3K",
)

# Their four choices hold the right text twice: told apart by the letter, not by the answer.
ROWS_WITH_A_REPEATED_CHOICE = [1283, 1516, 1823, 1902, 2126]
ROWS_WITHOUT_A_NUMBER = [186, 274, 1155, 1405, 1637, 2190, 2198, 2344]


def _rows() -> list[dict[str, Any]]:
    with open(FOLDER / "meta.jsonl") as file:
        rows = [json.loads(line) for line in file]
    return [row | {"gold": row["choices"]["ABCD".index(row["letter"])]} for row in rows]


def _numeric_rows() -> list[dict[str, Any]]:
    return [row for row in _rows() if row["id"] not in ROWS_WITHOUT_A_NUMBER]


def _spellings(gold: str) -> list[str]:
    """The same value as another writer would type it; made from the gold text without the code under test."""
    compact = gold.replace(" ", "")
    spellings = [
        *(
            gold,
            compact,
            f"${compact}$",
            f"x = {compact}",
            f"m\\angle A = {compact}^{{\\circ}}",
            f"{compact}°",
            f"{compact}.",
        ),
        *(f"{compact} \\text{{ cm}}^2", f"{compact}\\,\\text{{units}}", f"{gold} square units"),
        compact.replace(r"\frac", r"\dfrac").replace(r"\pi", "π"),
    ]
    if re.fullmatch(r"\d+", compact):
        spellings += [f"{compact}.0", f"\\frac{{{2 * int(compact)}}}{{2}}"]
    elif re.fullmatch(r"\d+\.\d+", compact):
        value = Fraction(compact)
        spellings += [f"{compact}0", f"\\frac{{{value.numerator}}}{{{value.denominator}}}"]
    elif fraction := re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", compact):
        numerator, denominator = map(int, fraction.groups())
        whole, rest = divmod(numerator, denominator)
        spellings += [f"{numerator}/{denominator}", f"\\frac{{{3 * numerator}}}{{{3 * denominator}}}"]
        if whole and rest:
            spellings += [f"{whole}\\frac{{{rest}}}{{{denominator}}}", f"{whole} {rest}/{denominator}"]
    elif radical := re.fullmatch(r"(\d+)\\sqrt\{(\d+)\}", compact):
        factor, radicand = map(int, radical.groups())
        spellings += [f"\\sqrt{{{factor**2 * radicand}}}", f"{factor} \\cdot \\sqrt{{{radicand}}}"]
    return spellings


def _accuracy(pairs: list[tuple[str, str]]) -> list[float]:
    inputs = [
        {"response": f"Half of 12 is \\boxed{{6}}, so \\boxed{{{answer}}}", "response_length": 9, "ground_truth": gold}
        for answer, gold in pairs
    ]
    return [score["accuracy"] for score in compute_score(inputs)]


@pytest.mark.heavy
def test_the_right_value_of_each_of_2393_numeric_rows_is_right_in_11_spellings_and_more() -> None:
    rows = _numeric_rows()
    assert len(rows) == 2393
    pairs = [(spelling, row["gold"]) for row in rows for spelling in _spellings(row["gold"])]
    assert len(pairs) > 11 * 2393
    refused = [pair for pair, accuracy in zip(pairs, _accuracy(pairs), strict=True) if accuracy != 1.0]
    assert refused == []


@pytest.mark.heavy
def test_the_three_other_choices_of_the_numeric_rows_are_wrong_but_for_five_repeated_texts() -> None:
    wrong = [
        (row, choice)
        for row in _numeric_rows()
        for letter, choice in zip("ABCD", row["choices"], strict=True)
        if letter != row["letter"]
    ]
    accuracies = _accuracy([(choice, row["gold"]) for row, choice in wrong])
    accepted = [(row, choice) for (row, choice), accuracy in zip(wrong, accuracies, strict=True) if accuracy != 0.0]
    assert len(wrong) == 3 * 2393
    assert [row["id"] for row, _ in accepted] == ROWS_WITH_A_REPEATED_CHOICE
    assert all(choice == row["gold"] for row, choice in accepted)


def test_the_8_answers_that_are_no_numbers_equal_themselves_and_none_of_their_other_choices() -> None:
    rows = [row for row in _rows() if row["id"] in ROWS_WITHOUT_A_NUMBER]
    assert len(rows) == 8
    assert _accuracy([(row["gold"].replace(" ", ""), row["gold"]) for row in rows]) == [1.0] * 8
    others = [(choice, row["gold"]) for row in rows for choice in row["choices"] if choice != row["gold"]]
    assert _accuracy(others) == [0.0] * 24
    bare_numbers = [(number, row["gold"]) for row in rows for number in re.findall(r"\d+", row["gold"])]
    assert set(_accuracy(bare_numbers)) == {0.0}
