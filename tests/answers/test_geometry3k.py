"""Geometry3K's real answers: right values are right in every spelling, and the other choices are wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from cepo.rewards.math import compute_score

FOLDER = Path(os.environ.get("CEPO_GEO3K") or Path(__file__).parents[3] / "shared" / "data" / "geo3k")
with_geometry3k = pytest.mark.skipif(
    not (FOLDER / "meta.jsonl").is_file(),
    reason=f"no meta.jsonl in {FOLDER}; name the folder of Geometry3K in CEPO_GEO3K",
)
# Their four choices hold the right text twice: told apart by the letter, not by the answer.
ROWS_WITH_A_REPEATED_CHOICE = [1283, 1516, 1823, 1902, 2126]
ROWS_WITHOUT_A_NUMBER = [186, 274, 1155, 1405, 1637, 2190, 2198, 2344]


def all_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open(FOLDER / "meta.jsonl") as file:
        for line in file:
            row = json.loads(line)
            row["truth"] = row["choices"]["ABCD".index(row["letter"])]
            rows.append(row)
    return rows


def numeric_rows() -> list[dict[str, Any]]:
    return [row for row in all_rows() if row["id"] not in ROWS_WITHOUT_A_NUMBER]


def spellings_of(truth: str) -> list[str]:
    """The same value as another writer would type it, no two alike; made without the code under test."""
    compact = truth.replace(" ", "")
    spellings = [
        truth,
        compact,
        f"${compact}$",
        f"\\({compact}\\)",
        f"x = {compact}",
        f"AB={compact}",
        f"\\text{{Area}} = {compact}",
        f"m\\angle A = {compact}^{{\\circ}}",
        f"x \\approx {compact}",
        f"{compact}°",
        f"{compact}^\\circ",
        f"{compact} \\text{{ degrees}}",
        f"{compact} \\text{{ cm}}^2",
        f"{compact}\\,\\text{{units}}",
        f"{compact}\\ \\mathrm{{ft}}",
        f"{truth} square units",
        f"\\text{{{compact}}}",
        f"{{{compact}}}",
        f"**{compact}**",
        f"{compact}.",
        re.sub(r"\\sqrt\{(\d+)\}", r"√\1", compact),
        re.sub(r"\\sqrt\{(\d+)\}", r" sqrt(\1)", compact),
        compact.replace(r"\frac", r"\dfrac").replace(r"\pi", "π"),
    ]
    return list(dict.fromkeys(spellings))


def accuracy_of(answer: str, truth: str) -> float:
    response = f"Half of 12 is \\boxed{{6}}, so \\boxed{{{answer}}}"
    return compute_score([{"response": response, "response_length": 9, "ground_truth": truth}])[0]["accuracy"]


@with_geometry3k
@pytest.mark.heavy
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly("all 2393 rows take a minute"))])
def test_all_2393_numeric_answers_are_right_in_19_spellings(every: int) -> None:
    rows = numeric_rows()
    assert len(rows) == 2393
    refused: list[tuple[str, str]] = []
    for row in rows[::every]:
        spellings = spellings_of(row["truth"])
        assert len(spellings) >= 19
        for spelling in spellings:
            if accuracy_of(spelling, row["truth"]) != 1.0:
                refused.append((spelling, row["truth"]))
    assert refused == []


@with_geometry3k
@pytest.mark.heavy
def test_other_choices_are_wrong_but_for_five_repeated_texts() -> None:
    num_choices = 0
    accepted: list[int] = []
    for row in numeric_rows():
        for letter, choice in zip("ABCD", row["choices"], strict=True):
            if letter == row["letter"]:
                continue
            num_choices += 1
            if accuracy_of(choice, row["truth"]):
                accepted.append(row["id"])
                assert choice == row["truth"]
    assert num_choices == 3 * 2393
    assert accepted == ROWS_WITH_A_REPEATED_CHOICE


@with_geometry3k
def test_the_8_answers_in_words_equal_only_themselves() -> None:
    rows = [row for row in all_rows() if row["id"] in ROWS_WITHOUT_A_NUMBER]
    assert len(rows) == 8
    for row in rows:
        truth = row["truth"]
        assert accuracy_of(truth.replace(" ", ""), truth) == 1.0
        wrong_choices = [choice for choice in row["choices"] if choice != truth]
        bare_numbers = re.findall(r"\d+", truth)
        assert [answer for answer in [*wrong_choices, *bare_numbers] if accuracy_of(answer, truth)] == []
