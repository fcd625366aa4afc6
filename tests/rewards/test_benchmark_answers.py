"""Multiple choice, numbers with a tolerance, and text: what an answer names, and whether it is right."""

from __future__ import annotations

import pytest

from cepo.rewards.benchmark import chosen_letters, compute_score, is_right, kind_of, options_in_text, read_answer

COLOURS = ("red", "blue", "green", "orange")


LETTERS = {
    "B": [
        "B", "(B)", "B.", r"\text{B}", r"\textbf{(B)}", "**B**", "B. blue", "(B) blue", "B: whatever else",
        "b", "(b)", "b) blue", "B - blue",
        "Option B", "The correct answer is (B).", "The answer is B. blue", "blue", r"\text{Blue}.",
    ],
    "BD": ["B, D", "B and D", "BD", "d, b"],
    "AC": ["(A), (C)"],
    "": ["E", "e", "Both are right", "A red one", "BLUEISH", "light blue", ""],
}  # fmt: skip


@pytest.mark.parametrize(("answer", "letters"), [(each, key) for key, some in LETTERS.items() for each in some])
def test_the_letters_that_an_answer_to_four_colours_names(answer: str, letters: str) -> None:
    assert chosen_letters(answer, COLOURS) == frozenset(letters)


def test_a_letter_wins_over_a_text_of_that_letter() -> None:
    assert chosen_letters("J") == {"J"}
    assert chosen_letters("K") == frozenset()
    shuffled = ("A", "E", "C", "G", "No correct answer")
    assert chosen_letters("E", shuffled) == {"E"}
    assert chosen_letters("G", shuffled) == {"D"}


def test_a_text_that_two_options_share_names_neither() -> None:
    assert chosen_letters("7 cm", ("7 cm", "7  cm", "8 cm")) == frozenset()
    assert chosen_letters(r"45 \mathrm{~cm}^2", (r"$36 \mathrm{~cm}^{2}$", r"$45 \mathrm{~cm}^{2}$")) == {"B"}


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Which colour? choice: (A) red (B) blue (C) green", ["red", "blue", "green"]),
        ("Which? Choices: (A) City A (B) City B", ["City A", "City B"]),
        ("Which?\n(A) 1, (B) 2", ["1", "2"]),
        ("Is (A) the point?", []),
        ("(B) one (C) two", []),
    ],
)
def test_options_are_read_from_a_question_that_lists_them_from_a(question: str, options: list[str]) -> None:
    assert options_in_text(question) == options


@pytest.mark.parametrize(
    ("response", "kind", "answer"),
    [
        (r"so \boxed{B}", "choice", "B"), (r"The answer is C. No: \boxed{B}", "choice", "B"),
        ("<answer>4.5</answer>", "numeric", "4.5"), ("The answer is B.", "choice", "B."),
        ("**Answer:** 42 cm\n", "numeric", "42 cm"), ("The answer is 3. Wait.\nFinal answer: 5", "numeric", "5"),
        ("It rises.\n(B) blue", "choice", "(B) blue"), ("Adding gives\n17.5", "numeric", "17.5"),
        ("Adding gives 17.5", "numeric", None), ("It rises.\nB is not it", "choice", None), ("Sep", "text", None),
        ("The answer is", "text", None), ("", "choice", None),
    ],
)  # fmt: skip
def test_a_box_then_a_stated_answer_then_a_last_line_counts(response: str, kind: str, answer: str | None) -> None:
    assert read_answer(response, kind, COLOURS) == answer  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "gold", "kind", "tolerance", "right"),
    [
        ("B", "B", "choice", 0, True), ("blue", "B", "choice", 0, True), ("A", "B", "choice", 0, False),
        ("A", "A, C", "choice", 0, False), ("C, A", "A, C", "choice", 0, True),
        ("2.094", "2.0944", "numeric", 1e-3, True), ("2.094", "2.0944", "numeric", 0, False),
        (r"\frac{2\pi}{3}", "2.0944", "numeric", 1e-3, True), ("2.0954", "2.0944", "numeric", 1e-3, True),
        ("2.0955", "2.0944", "numeric", 1e-3, False), ("2:5", "0.4", "numeric", 1e-3, True),
        ("about 2", "2", "numeric", 1e-3, False), ("(3,1)", "(3.000, 1.000)", "text", 1e-3, True),
        ("(-2.7774, -1.136)", "(-2.777, -1.136)", "text", 1e-3, True),
        ("(3, 2)", "(3.000, 1.000)", "text", 1e-3, False), ("(3, 1, 0)", "(3.000, 1.000)", "text", 1e-3, False),
        ("sep", "Sep", "text", 0, True), ("Apr", "Aug", "text", 0, False), ("bs", "BS", "text", 0, True),
        ("y=4", "y = 4", "text", 0, True),
    ],
)  # fmt: skip
def test_letters_numbers_and_words_are_judged_as_by_a_reader(
    answer: str, gold: str, kind: str, tolerance: float, right: bool
) -> None:
    assert is_right(answer, gold, kind, COLOURS if kind == "choice" else (), tolerance) is right  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("B", "choice"), ("A, C", "choice"), ("60", "numeric"), (r"5 \sqrt { 3 }", "numeric"), ("Sep", "text"),
        ("K", "text"),
    ],
)  # fmt: skip
def test_the_kind_of_an_answer_that_no_column_tells(gold: str, kind: str) -> None:
    assert kind_of(gold) == kind


def test_the_columns_of_a_row_decide_how_it_is_graded() -> None:
    sample = {"response": r"\boxed{blue}", "response_length": 3, "ground_truth": "B"}
    coloured = sample | {"answer_kind": "choice", "choices": list(COLOURS), "tolerance": None}
    number = sample | {"response": r"\boxed{1.2}", "ground_truth": "1.25", "answer_kind": "numeric", "tolerance": 0.05}
    assert [score["overall"] for score in compute_score([sample, coloured, number])] == [0.0, 1.0, 1.0]
