"""The real answers of Geometry3K: right values are right in every spelling, the other choices are wrong."""

from __future__ import annotations

import json
import os
import re
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
    """The same value as another writer would type it, no two alike; made from the gold text without the code under test."""
    compact = gold.replace(" ", "")
    spellings = [
        gold, compact, f"${compact}$", f"\\({compact}\\)", f"x = {compact}", f"AB={compact}",
        f"\\text{{Area}} = {compact}", f"m\\angle A = {compact}^{{\\circ}}", f"x \\approx {compact}", f"{compact}°",
        f"{compact}^\\circ", f"{compact} \\text{{ degrees}}", f"{compact} \\text{{ cm}}^2",
        f"{compact}\\,\\text{{units}}", f"{compact}\\ \\mathrm{{ft}}", f"{gold} square units",
        f"\\text{{{compact}}}", f"{{{compact}}}", f"**{compact}**", f"{compact}.",
        *(re.sub(r"\\sqrt\{(\d+)\}", root, compact) for root in (r"√\1", r" sqrt(\1)")),
        compact.replace(r"\frac", r"\dfrac").replace(r"\pi", "π"),
    ]  # fmt: skip
    return list(dict.fromkeys(spellings))


def _accuracy(pairs: list[tuple[str, str]]) -> list[float]:
    inputs = [
        {"response": f"Half of 12 is \\boxed{{6}}, so \\boxed{{{answer}}}", "response_length": 9, "ground_truth": gold}
        for answer, gold in pairs
    ]
    return [score["accuracy"] for score in compute_score(inputs)]


@pytest.mark.heavy
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly("all 2393 rows take a minute"))])
def test_all_2393_numeric_answers_are_right_in_19_spellings(every: int) -> None:
    rows = _numeric_rows()
    assert len(rows) == 2393
    rows = rows[::every]
    spellings = [_spellings(row["gold"]) for row in rows]
    assert min(map(len, spellings)) == 19
    pairs = [(spelling, row["gold"]) for row, them in zip(rows, spellings, strict=True) for spelling in them]
    refused = [pair for pair, accuracy in zip(pairs, _accuracy(pairs), strict=True) if accuracy != 1.0]
    assert refused == []


@pytest.mark.heavy
def test_other_choices_are_wrong_but_for_five_repeated_texts() -> None:
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


def test_the_8_answers_in_words_equal_only_themselves() -> None:
    rows = [row for row in _rows() if row["id"] in ROWS_WITHOUT_A_NUMBER]
    assert len(rows) == 8
    assert _accuracy([(row["gold"].replace(" ", ""), row["gold"]) for row in rows]) == [1.0] * 8
    others = [(choice, row["gold"]) for row in rows for choice in row["choices"] if choice != row["gold"]]
    assert _accuracy(others) == [0.0] * 24
    bare_numbers = [(number, row["gold"]) for row in rows for number in re.findall(r"\d+", row["gold"])]
    assert set(_accuracy(bare_numbers)) == {0.0}
