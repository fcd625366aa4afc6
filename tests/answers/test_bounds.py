"""Answers that are written to cost time do not: each is compared within a second."""

from __future__ import annotations

import itertools
import time

import pytest

from cepo.answers import equal
from cepo.answers.algebra import is_too_costly

HUGE = [
    r"10^{10^9}", r"10^{10^{9}}", "10^10^9", "9^{9^{9^9}}", r"2^{10^{6}\cdot 10}", r"x^{123456789}", "(x+1)^{100000}",
    "99999!", "9!!!!", "(60!)!", "(3!)!", "{10^9}!", "10^(10^9)", r"2^{ 3 ^ { 4 ^ 5 } }", r"\frac{1}{7^{7^{77}}}",
    r"\exp(\exp(10^{9999}))", r"\sum_{i=1}^{9}i",
]  # fmt: skip
SMALL = [
    "10^{9}", "2^{10}", "x^{2}", "10^{-12}", r"e^{x^2}", r"2^{2^{2}}", r"x^{\frac{3}{4}}", r"2^{2023}", "12.5^2",
    r"60^\circ", "^", "^{", "2^", "", "(a^2+b^2)", "x^2y^5", r"\frac{5\sqrt{41 + \sqrt{2}}}{2}", "((((1))))",
    "1, 2, 3, 4, 5, 6, 7, 8",
]  # fmt: skip
COSTLY = [
    "9^{9^{9^9}}", "9999!^{9999!}", "+".join(f"1/{9980 + term}!" for term in range(20)), "x^{9999}+y^{9999}",
    "not enough informat^ion", "(x+y+z+w)^{99}", "5 kg" + " m" * 120, "a b c d e f g h i j " * 20, r"\sqrt{" * 80, "1 h " * 100,
    "½" * 500, r"\pm" * 100, "(A) " * 120, r"\sin(10^{9999})", r"\exp(9999^{9999})", r"\tan(9^{9999})", r"\ln(9^{9999})",
    "1-" * 250 + "1", "10-20 " * 80, "(1) " * 120, "(CO)2" * 100, "C" * 500, "2021-07-04 " * 40, "12个" * 200,
]  # fmt: skip
TRUTHS = [
    "24", r"5\sqrt{3}", "x^2+1", "xe^x", "B", "(3, 4)", "x < 60", "5 kg", "y = 2x + 1", r"60\%", "2021-07-04", "10-20", "CO2",
    "555-0132", "3:30", r"\sin 30^\circ",
]  # fmt: skip


@pytest.mark.parametrize("answer", COSTLY)
def test_no_answer_takes_longer_than_a_second(answer: str) -> None:
    """Some of them kept simplification busy for minutes."""
    began = time.process_time()
    for truth in TRUTHS:
        assert equal(answer, truth) is False
        assert equal(truth, answer) is False
    assert time.process_time() - began < len(TRUTHS)


@pytest.mark.parametrize(
    ("answer", "truth"),
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
        (r"\begin{pmatrix}" + "1 & 2 \\\\ " * 20 + r"\end{pmatrix}", "x^2 + 1"),
    ],
)
def test_a_costly_expression_is_wrong_unless_spelled_alike(answer: str, truth: str) -> None:
    """Each of them kept math-verify busy for 2 seconds to minutes."""
    began = time.process_time()
    assert not equal(answer, truth)
    assert not equal(truth, answer)
    assert equal(f" {answer} ", answer)
    assert time.process_time() - began < 2


def test_huge_numbers_are_too_costly_and_ordinary_ones_not() -> None:
    assert [text for text in HUGE if not is_too_costly(text)] == []
    assert [text for text in SMALL if is_too_costly(text)] == []


def test_the_cost_of_any_text_can_be_told() -> None:
    for parts in itertools.product(["^", "{", "}", "9", "!", "(", ")", "."], repeat=4):
        assert is_too_costly("".join(parts)) in (True, False)
    for unit in ("^", "^{", "9^", "9^{", "(^"):
        assert is_too_costly((unit * 200)[:200]) in (True, False)
