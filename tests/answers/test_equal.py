"""Which spellings are equal: the rows of `data/equal_answers.json` and of the table of docs/rewards.md."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from cepo.answers import equal, normal_form

DATA = Path(__file__).parent / "data"
PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
CELLS = re.compile(r"(?<!\\)\|")
SPELLING = re.compile(r"`([^`]+)`")


def rows_of(file: str) -> list[dict[str, Any]]:
    """The rows of all sections of a data file."""
    sections = json.loads((DATA / file).read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for section in sections.values():
        rows.extend(section)
    return rows


def rows_of_page() -> list[dict[str, Any]]:
    """The rows of the page's table: a truth, what is accepted for it, and what is wrong."""
    rows: list[dict[str, Any]] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = CELLS.split(line)[1:-1]
        spellings = [SPELLING.findall(cell.replace(r"\|", "|")) for cell in cells]
        if len(cells) == 4 and spellings[0]:
            truth, accepted, wrong, _ = spellings
            rows.append({"truth": truth[0], "equal": accepted, "different": wrong})
    return rows


ROWS = [*rows_of("equal_answers.json"), *rows_of_page()]


def test_there_are_2500_spellings() -> None:
    assert len(rows_of_page()) > 15
    number = 0
    for row in ROWS:
        number += len(row["equal"]) + len(row["different"])
    assert number > 2500


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["truth"])
def test_a_row_has_the_verdicts_it_says(row: dict[str, Any]) -> None:
    truth = row["truth"]
    refused = [spelling for spelling in row["equal"] if not equal(spelling, truth)]
    accepted = [spelling for spelling in row["different"] if equal(spelling, truth)]
    assert refused == []
    assert accepted == []
    assert equal(truth, truth)


def test_each_spelling_has_a_stable_normal_form() -> None:
    for row in ROWS:
        for text in (row["truth"], *row["equal"], *row["different"]):
            form = normal_form(text)
            assert normal_form(form) == form


@pytest.mark.parametrize("row", rows_of("normal_forms.json"), ids=lambda row: row["text"])
def test_a_text_has_the_normal_form_written_here(row: dict[str, str]) -> None:
    assert normal_form(row["text"]) == row["form"]


@pytest.mark.parametrize("row", rows_of("pairs.json"), ids=lambda row: row["answer"])
def test_a_pair_has_the_verdict_fixed_before_the_code_was_asked(row: dict[str, Any]) -> None:
    """700 pairs of the kinds that ChartQA, DocVQA, MathVista, MMMU and WeMath have, and variants of what was once wrong."""
    settings = {name: row[name] for name in ("tolerance", "decimals") if name in row}
    assert equal(row["answer"], row["truth"], **settings) is row["right"]


@pytest.mark.parametrize("space", ["\u2009", "\u00a0", "\u202f", "\u2007", "\u3000"])
def test_any_unicode_space_joins_thousands(space: str) -> None:
    assert equal(f"3{space}000{space}000", "3000000")
    assert equal(f"5{space}kg", "5 kg")
    assert not equal(f"3{space}00", "300")


@pytest.mark.parametrize("answer", ["1B", "B1", "B^2", r"\beta", "neither B", "b + c", "AB", "B or C"])
def test_what_only_holds_a_letter_is_no_choice(answer: str) -> None:
    assert not equal(answer, "B")


@pytest.mark.parametrize("answer", ["", "   ", "None", "{60", "The answer is 60", "sixty 60", "60" + "0" * 300])
def test_what_states_no_number_is_not_60(answer: str) -> None:
    assert not equal(answer, "60")


@pytest.mark.parametrize(
    ("answer", "truth", "tolerance", "is_right"),
    [
        ("2.094", "2.0944", 1e-3, True),
        ("2.0954", "2.0944", 1e-3, True),
        ("2.0955", "2.0944", 1e-3, False),
        (r"\frac{2\pi}{3}", "2.0944", 1e-3, True),
        ("12.004 cm", "12 cm", 0.005, True),
        ("12.004 m", "12 cm", 0.005, False),
        ("120.04 mm", "12 cm", 0.005, True),
        ("€12.50", "$12.50", 0.1, False),
        ("30.1 rad", r"30^\circ", 0.5, False),
        ("(3, 1.0004)", "(3.000, 1.000)", 1e-3, True),
        ("(3, 2)", "(3.000, 1.000)", 1e-3, False),
        ("2021-07-04", "2010", 5, False),
        ("60.4%", "60%", 0.005, True),
    ],
)
def test_a_tolerance_is_in_the_unit_of_the_truth(answer: str, truth: str, tolerance: float, is_right: bool) -> None:
    assert equal(answer, truth, tolerance=tolerance) is is_right
    assert not equal(answer, truth) or answer == truth


def test_numbers_may_be_compared_rounded() -> None:
    assert equal("1.23", "1.2", decimals=1)
    assert not equal("1.26", "1.2", decimals=1)
    assert not equal("1.23", "1.2")


def test_an_error_of_a_library_makes_an_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bool:
        raise OverflowError("absolute value too large")

    monkeypatch.setattr("cepo.answers.comparison._equal", failing)
    assert equal("60", "60") is False


def test_comparing_works_off_the_main_thread_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    results: list[bool] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: results.append(equal(r"\sqrt{12}", r"2 \sqrt { 3 }")))
        thread.start()
        thread.join(30)
    assert results == [True]
    assert caplog.records == []
