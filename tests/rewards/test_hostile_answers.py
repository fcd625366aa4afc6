"""Answers that are written to cost time do not."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest

from cepo.rewards.answers import answers_equal, extract_answer
from cepo.rewards.benchmark import read_answer
from cepo.rewards.magnitude import is_too_costly
from lab.hostile_answers import figures, samples_of

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


@pytest.mark.parametrize(
    ("answer", "gold", "is_equal"),
    [
        ("1 + x^2", "x^2 + 1", True),
        ("(x+1)^2", "x^2 + 2x + 1", True),
        (r"\sin(x)^2 + \cos(x)^2 + y", "y + 1", True),
        ("x^2 + 1", "x^2 + 2", False),
        ("y^2 + 1", "x^2 + 1", False),
    ],
)
def test_algebra_is_compared_at_a_point_before_it_is_simplified(answer: str, gold: str, is_equal: bool) -> None:
    assert answers_equal(answer, gold) is is_equal


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
