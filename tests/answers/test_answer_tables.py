"""The tables of `docs/answers.md` and `docs/rewards.md`, row by row: equal spellings are right, and different ones wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from cepo.answers.equality import answers_equal, normalise_answer

DOCS = Path(__file__).parents[2] / "docs"
CELLS = re.compile(r"(?<!\\)\|")
SPELLING = re.compile(r"`([^`]+)`")


def rows_of(page: str, heading: str) -> list[tuple[str, list[str], list[str]]]:
    """The ground truth, the equal and the different spellings of each row of a page's tables with this heading."""
    rows: list[tuple[str, list[str], list[str]]] = []
    is_table = False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith(heading):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and not line.startswith("| ---"):
            cells = [SPELLING.findall(cell.replace(r"\|", "|")) for cell in CELLS.split(line)[1:-1]]
            rows.append((cells[0][0], cells[1], cells[2]))
    return rows


SPELLINGS = rows_of("answers.md", "| ground truth | equal")
BEYOND = rows_of("rewards.md", "| ground truth | accepted")


def test_the_tables_hold_2000_spellings() -> None:
    """The pages are found and read: 333 rows in one, 18 in the other."""
    assert (len(SPELLINGS), len(BEYOND)) == (333, 18)
    assert sum(len(equal) + len(different) for _, equal, different in SPELLINGS + BEYOND) > 2000


@pytest.mark.parametrize(("gold", "equal", "different"), SPELLINGS + BEYOND)
def test_a_row_of_the_tables_has_the_verdicts_it_says(gold: str, equal: list[str], different: list[str]) -> None:
    assert equal
    assert different
    assert [spelling for spelling in equal if not answers_equal(spelling, gold)] == []
    assert [spelling for spelling in different if answers_equal(spelling, gold)] == []
    assert answers_equal(gold, gold)


def test_each_spelling_of_the_tables_has_a_stable_normal_form() -> None:
    for gold, equal, different in SPELLINGS + BEYOND:
        for text in (gold, *equal, *different):
            spelled = normalise_answer(text)
            assert normalise_answer(spelled) == spelled
            assert answers_equal(spelled, text)


@pytest.mark.parametrize("space", ["\u2009", "\u00a0", "\u202f", "\u2007", "\u3000"])
def test_any_unicode_space_joins_thousands(space: str) -> None:
    assert answers_equal(f"3{space}000{space}000", "3000000")
    assert answers_equal(f"5{space}kg", "5 kg")
    assert not answers_equal(f"3{space}00", "300")


@pytest.mark.parametrize("prediction", ["1B", "B1", "B^2", r"\beta", "neither B", "b + c", "AB", "B or C"])
def test_what_only_holds_a_letter_is_no_choice(prediction: str) -> None:
    assert not answers_equal(prediction, "B")


COSTLY = [
    "9^{9^{9^9}}", "9999!^{9999!}", "+".join(f"1/{9980 + term}!" for term in range(20)), "x^{9999}+y^{9999}",
    "not enough informat^ion", "(x+y+z+w)^{99}", "5 kg" + " m" * 120, "a b c d e f g h i j " * 20, r"\sqrt{" * 80, "1 h " * 100,
    "½" * 500, r"\pm" * 100, "(A) " * 120,
]  # fmt: skip


@pytest.mark.parametrize("answer", COSTLY)
def test_no_answer_takes_longer_than_a_second(answer: str) -> None:
    """Some of them kept simplification busy for minutes."""
    golds = ("24", r"5\sqrt{3}", "x^2+1", "xe^x", "B", "(3, 4)", "x < 60", "5 kg", "y = 2x + 1", r"60\%")
    began = time.process_time()
    for gold in golds:
        assert answers_equal(answer, gold) is False
        assert answers_equal(gold, answer) is False
    assert time.process_time() - began < len(golds)


def test_an_error_of_a_library_makes_an_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(prediction: str, gold: str) -> bool:
        raise OverflowError("absolute value too large")

    monkeypatch.setattr("cepo.answers.equality.equal_answers", failing)
    assert answers_equal("60", "60") is False
