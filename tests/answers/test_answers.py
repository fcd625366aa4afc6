"""Reading and comparing answers: tables worked out by hand, and answers that are written to cost time do not.

Of Geometry3K's real answers, right values are right in every spelling and the other choices are wrong.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cepo.answers.equality import answers_equal, extract_answer, normalise_answer, value_key
from cepo.answers.magnitude import is_too_costly
from cepo.rewards.benchmark import read_answer
from cepo.rewards.math import compute_score
from lab.hostile_answers import figures, samples_of

RESPONSES = {
    "5": [r"so \boxed{5}", r"\boxed{3} and then \boxed{5}", r"\boxed{5} then cut off \boxed{6"],
    r"\frac{40}{3}": [r"\boxed{\frac{40}{3}} cm"],
    r"5 \sqrt { 3 }": [r"\boxed {5 \sqrt { 3 }}"],
    r"\boxed{7}": [r"\boxed{\boxed{7}}"],
    r"\{1, 2\}": [r"\boxed{\{1, 2\}}"],
    r"a \} b": [r"\boxed{a \} b}"],
    r"1 + \boxed{2}": [r"\boxed{1 + \boxed{2}} is cut off \boxed{3 { }"],
    "7": [r"\boxed{6 and \boxed{7}", r"cut off \boxed{6, so <answer>7</answer>"],
    "8": [r"} stray \boxed{8}", r"<answer>\boxed{8}</answer>"],
    None: [
        r"cut off \boxed{6", r"\boxed{}", r"\boxed{   }", r"\boxed{5} or \boxed{}", "<answer> </answer>", "None",
        "the answer is 5", "",
    ],
    "4": ["<answer>3</answer> no, <answer> 4 </answer>", r"<answer>3</answer> but \boxed{4}"],
    "9": ["<Answer>\n9\n</Answer>"],
}  # fmt: skip


@pytest.mark.parametrize(("response", "answer"), [(each, key) for key, some in RESPONSES.items() for each in some])
def test_the_last_whole_box_is_the_answer_and_else_the_last_tag(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


SPELLINGS = {
    "60": [
        "60", "60°", r"60^\circ", r"60 ^ { \circ }", r"60\degree", r"60^{\,\circ}", r"60{}^\circ", "{60}", r"60\,",
        "60 degrees", "x = 60", "60 = x", r"\text{Area} = 60", r"x = 2 \cdot 30 = 60", r"60 \text{ cm}^2",
    ],
    "{60": ["{60"],
    "{1}{2}": ["{1}{2}"],
    "34.6": ["≈ 34.6", r"x \approx 34.6"],
    r"6\sqrt{2}": ["6sqrt(2)", r"\textbf{6\sqrt{2}}", r"6 \sqrt 2", r"6\sqrt2", "6√2"],
    r"10\pi": ["10 pi", r"10\pi\text{ in}^{2}", "10π"],
    r"\frac{1}{\sqrt{2}}": [r"\text{\frac{1}{\sqrt{2}}}"],
    "45": [r"m\angle A = 45^\circ"],
    "12": [r"12 \, \text{units}"],
    "48": ["48 sq. ft.", "48 square units", r"\(48\)", r"\boxed{48}", "**48**", "48."],
    r"5\sqrt{3}": ["$5 \\sqrt { 3 }$"],
    "1234": ["1,234"],
    "1234.5": ["1{,}234.5"],
    "-8": ["- 8"],
    "0.5": [".5"],
    r"\frac{40}{3}": [r"\dfrac { 40 } { 3 }"],
    r"\frac{1}{2}": [r"\frac12"],
    r"13\frac{1}{3}": ["13 1/3"],
    "6 0": ["6 0"],
    "2x=60": ["2x = 60"],
    "a+b=90": ["a + b = 90"],
    "20y^2-10y": ["20 y^2 - 10 y"],
    "5am": ["5 a m"],
    "notenoughinformation": [r"\text{not enough information}"],
    r"2\times r": [r"2 \times r"],
}  # fmt: skip


@pytest.mark.parametrize(("text", "normalised"), [(each, key) for key, some in SPELLINGS.items() for each in some])
def test_each_spelling_becomes_the_one_written_here_and_stays_it(text: str, normalised: str) -> None:
    assert normalise_answer(text) == normalised
    assert normalise_answer(normalised) == normalised


RIGHT = {
    "60": [r"60^\circ", "x = 60", r"60 \text{ cm}^2", "60.0", "60°", r"2 \times 30", "(60)", "60 kg", r"\$60"],
    "45": [r"m\angle A = 45^\circ"],
    "12": [r"12 \, \text{units}"],
    r"5 \sqrt { 3 }": [r"5\sqrt{3}", r"\sqrt{75}"],
    r"\frac { 40 } { 3 }": [r"13\frac{1}{3}", "40/3", r"\dfrac{40}{3}.", "13 1/3"],
    "7.5": [r"\frac{15}{2}"],
    "2:3": [r"\frac{2}{3}", "2 : 3", "4:6"],
    r"\frac { 5 } { 2 } \sqrt { 41 }": [r"\frac{5\sqrt{41}}{2}"],
    r"38 + 6 \sqrt { 2 } + 6 \sqrt { 3 }": [r"38+6(\sqrt{2}+\sqrt{3})"],
    r"4 \frac { 4 } { 11 }": [r"\frac{48}{11}"],
    r"\frac { \pi } { 4 }": ["π/4"],
    r"60\%": ["0.6", r"\frac{3}{5}", "60%", "60"],
    "0.6": [r"60 \%"],
    r"\frac{3}{5}": [r"x = 60\%"],
    "10.0": ["10"],
    "131.00": ["131"],
    r"\sqrt { 3 } :1": [r"\sqrt{3}"],
    r"1: \sqrt 3": [r"\frac{\sqrt{3}}{3}"],
    "1234": ["x = 1,000 + 234 = 1,234"],
    "36\\pi": [r"A = \pi r^2 = 36\pi \text{ cm}^2"],
    "34.6": [r"20\sqrt{3} \approx 34.6"],
    r"20 \sqrt { 3 }": [r"x = 20\sqrt{3} \approx 34.6"],
    "m + n - 180": ["n + m - 180"],
    "x < 60": ["x<60"],
    "20 y^2 - 10 y": ["10y(2y - 1)"],
    "x^2 + 1": ["1 + x^2"],
    "x^2 + 2x + 1": ["(x+1)^2"],
    "y + 1": [r"\sin(x)^2 + \cos(x)^2 + y"],
    r"\angle 1 \cong \angle 4": [r"$\angle 1\cong\angle 4$"],
    "not enough information": [r"\text{Not enough information.}"],
    "B": ["B"],
}  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), [(each, key) for key, some in RIGHT.items() for each in some])
def test_the_same_answer_in_another_form_is_right(gold: str, prediction: str) -> None:
    assert answers_equal(prediction, gold) is True


WRONG = {
    "34.6": [r"20\sqrt{3}", "34.64"],
    r"5 \sqrt { 3 }": ["8.66", "8.660254", "8.660254037844386", "3"],
    r"10 \pi": ["31.42"],
    r"\frac { 40 } { 3 }": ["13.33"],
    r"8 \pi": ["8"],
    r"\frac { 3 } { 7 }": ["7"],
    r"6 \sqrt { 2 }": [r"6\sqrt{3}"],
    "60": [
        "2x = 60", "60 or 70", "x = 60, y = 60", "60, 70", "sixty 60", "The answer is 60", r"\{60\}", r"60 \pm 1",
        "60'", "6 0", r"60\%", "", "   ", "None", "{60", "60" + "0" * 300,
        "60" + " " * 600 + "cm", "60:1:1", "60/m", "60/s", r"60\frac{1}{m}", "60i",
    ],
    "70": ["x = 60, y = 70", r"x = 60 \text{ or } x = 70", "x = 60; x = 70"],
    r"3 \sqrt { 2 }": [r"3\sqrt{2} \approx 4.2"],
    "5": ["5%", r"5 \approx 6", r"4.99 \approx 5.01 \approx 5", r"\frac{5}{0}", r"\sqrt{-25}"],
    r"60\%": [r"6\%", "6000", "0.06"],
    r"0.6\%": [r"60\%"],
    "2:3": ["3:2", "2"],
    "60:1:1": ["60"],
    "1:2:3": ["1:2:4"],
    "a + b = 90": ["90"],
    r"\angle 1 \cong \angle 4": ["4"],
    "x < 60": ["60"],
    "x^2 + 2": ["x^2 + 1"],
    "x^2 + 1": ["y^2 + 1"],
    "B": ["C"],
}  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), [(each, key) for key, some in WRONG.items() for each in some])
def test_another_answer_is_wrong(gold: str, prediction: str) -> None:
    assert answers_equal(prediction, gold) is False


def test_answers_of_one_value_share_a_key() -> None:
    """Numbers by value, words in any case; a rounding is another value, and so is another text."""
    assert len({value_key(text) for text in ("0.5", "1/2", r"\frac{1}{2}", r"50\%", "x = .5", r"2^{-1}")}) == 1
    assert value_key(r"5 \sqrt { 3 }") == value_key(r"\sqrt{75}") != value_key("8.66")
    assert value_key("Not enough information") == value_key("not enough  information") != value_key("40")
    assert value_key("-0") == value_key("0.0") == "0"
    assert value_key("9" * 600) == "9" * 600
    assert value_key("0/0") == "0/0" != value_key(r"\frac{0}{0}"), "they state no number, so their spellings count"
    assert value_key("99999!") == "99999!", "a value too large to be computed has its spelling"


def test_comparing_works_off_the_main_thread_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    results: list[bool] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: results.append(answers_equal(r"\sqrt{12}", r"2 \sqrt { 3 }")))
        thread.start()
        thread.join(30)
    assert results == [True]
    assert caplog.records == []


SIZE = 1_000_000


def searched_plainly(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL | re.IGNORECASE)
    return (found[-1].strip() or None) if found else None


def test_the_last_tagged_answer_is_what_a_plain_search_finds() -> None:
    draw = random.Random(1)
    parts = ["<answer>", "</answer>", "<ANSWER>", "</Answer>", "a", " ", "\n", "<answer", "answer>", "</", "<"]
    for _ in range(20_000):
        text = "".join(draw.choices(parts, k=draw.randint(0, 12)))
        assert extract_answer(text) == searched_plainly(text), repr(text)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "unit",
    ["<answer>", "</answer>", "<answer></answer", r"\boxed{", "{", "}", "\\", "answer is ", "answer:\n", " ", "^{"],
)
def test_a_million_hostile_characters_are_read_in_linear_time(unit: str) -> None:
    text = unit * (SIZE // len(unit))
    began = time.process_time()
    extract_answer(text)
    read_answer(text, "numeric")
    assert time.process_time() - began < 10  # a quadratic search takes minutes to hours


HUGE = [
    r"10^{10^9}", r"10^{10^{9}}", "10^10^9", "9^{9^{9^9}}", r"2^{10^{6}\cdot 10}", r"x^{123456789}", "(x+1)^{100000}",
    "99999!", "9!!!!", "(60!)!", "(3!)!", "(99999)!", r"{10^9}!", "10^(10^9)", r"2^{ 3 ^ { 4 ^ 5 } }", r"\frac{1}{7^{7^{77}}}",
]  # fmt: skip
SMALL = [
    "10^{9}", "2^{10}", "5!", "x^{2}", "10^{-12}", r"e^{x^2}", r"2^{2^{2}}", r"x^{\frac{3}{4}}", r"2^{2023}", "12.5^2",
    r"60^\circ", r"a^{n}!", "^", "^{", "2^", "", "x!", "(5)!", "(a^2+b^2)",
    r"\frac{5\sqrt{41 + \sqrt{2}}}{2}", "((((1))))", "1, 2, 3, 4, 5, 6, 7, 8",
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *((answer, "24") for answer in HUGE),
        ("(" * 200 + "1" + ")" * 200, "4"),
        ("(" * 20 + "1", "(3, 4)"),
        (r"\sin(" * 8 + "1" + ")" * 8, "x^2 + 1"),
        (r"\{" + ",".join(map(str, range(120))) + r"\}", "x < 60"),
        ("-" * 500 + "1", r"5 \sqrt { 3 }"),
        ("1" + "+1" * 250, "x < 60"),
        ("(x+1)^{9999}-0", "x^2 + 1"),
        (r"\int_{0}^{1} x^{x^{x}} dx", "x^2 + 1"),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "(3, 4)"),
        (r"\binom{9999}{5000}", "x^2 + 1"),
    ],
)
def test_a_costly_expression_is_wrong_unless_spelled_alike(answer: str, gold: str) -> None:
    """Each of them kept math-verify busy for 2 seconds to minutes."""
    began = time.process_time()
    assert not answers_equal(answer, gold)
    assert not answers_equal(gold, answer)
    assert answers_equal(f" {answer} ", answer)
    assert time.process_time() - began < 2


def test_huge_numbers_are_too_costly_and_ordinary_ones_not() -> None:
    assert all(map(is_too_costly, HUGE))
    assert not any(map(is_too_costly, SMALL))


@pytest.mark.heavy
def test_generated_adversarial_answers_are_graded_in_any_order() -> None:
    """`python3 -m lab.hostile_answers` does the same with 10,000."""
    found = figures(samples_of(150, seed=3), timeout=10.0, workers=2, seed=4)
    assert found["other_verdict_in_another_order"] == 0
    assert (found["timed_out"], found["raised"]) == (0, 0)
    assert 0 < found["right"] < 150
    assert found["mean_seconds"] < 0.1


def test_any_text_has_a_magnitude() -> None:
    for parts in itertools.product(["^", "{", "}", "9", "!", "(", ")", "."], repeat=4):
        is_too_costly("".join(parts))
    for unit in ("^", "^{", "9^", "9^{", "(^"):
        is_too_costly((unit * 200)[:200])


FOLDER = Path(os.environ.get("CEPO_GEO3K") or Path(__file__).parents[3] / "shared" / "data" / "geo3k")

with_geo3k = pytest.mark.skipif(
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


@with_geo3k
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


@with_geo3k
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


@with_geo3k
def test_the_8_answers_in_words_equal_only_themselves() -> None:
    rows = [row for row in _rows() if row["id"] in ROWS_WITHOUT_A_NUMBER]
    assert len(rows) == 8
    assert _accuracy([(row["gold"].replace(" ", ""), row["gold"]) for row in rows]) == [1.0] * 8
    others = [(choice, row["gold"]) for row in rows for choice in row["choices"] if choice != row["gold"]]
    assert _accuracy(others) == [0.0] * 24
    bare_numbers = [(number, row["gold"]) for row in rows for number in re.findall(r"\d+", row["gold"])]
    assert set(_accuracy(bare_numbers)) == {0.0}
