"""Multiple choice, numbers with a tolerance, and text: what an answer names, and whether it is right."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler

import pytest
from local_server import local_server

from cepo.errors import RewardError
from cepo.rewards.benchmark import (
    chosen_letters,
    compute_score,
    final_answer,
    is_right,
    kind_of,
    options_in_text,
    read_answer,
    yes_or_no,
)

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


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (r"so \boxed{Yes}", "yes"), (r"\boxed{\text{no}}", "no"), ("<answer>No, they are not.</answer>", "no"),
        ("Both are long.\nThe answer is yes.", "yes"), ("Yes, they are equal.", "yes"), ("It may be.\nNo", "no"),
        ("yes or no?", None), ("I cannot tell", None), (r"\boxed{nothing}", None), ("Yesterday", None), ("", None),
    ],
)  # fmt: skip
def test_an_answer_is_the_word_yes_or_the_word_no(response: str, word: str | None) -> None:
    answer = final_answer(response, "yes_no")
    assert (answer and yes_or_no(answer)) == word
    inputs = {"response": response, "answer_kind": "yes_no"}
    scores = compute_score([inputs | {"ground_truth": gold} for gold in ("yes", "no")])
    assert [score["accuracy"] for score in scores] == [float(word == "yes"), float(word == "no")]


@pytest.mark.parametrize(
    ("answer", "decimals", "is_correct"),
    [
        ("1.2", 1, True),
        ("1.23", 1, True),
        ("1.24", None, False),
        ("1.26", 1, False),
        ("1.3", 1, False),
        ("x", 1, False),
    ],
)
def test_numbers_are_compared_rounded_to_their_decimals(answer: str, decimals: int | None, is_correct: bool) -> None:
    row = {"response": rf"\boxed{{{answer}}}", "ground_truth": "1.2", "answer_kind": "numeric", "decimals": decimals}
    assert compute_score([row])[0]["accuracy"] == is_correct


def test_an_alternative_answer_is_right() -> None:
    row = {
        "response": r"\boxed{3.5}",
        "ground_truth": "24/7",
        "answer_kind": "numeric",
        "alternatives": ["3.429", "3.5"],
    }
    assert compute_score([row])[0]["accuracy"] == 1.0
    assert compute_score([row | {"alternatives": None}])[0]["accuracy"] == 0.0


def test_the_first_tag_counts_if_asked() -> None:
    row = {"response": r"<think>\boxed{1}</think><answer>2</answer> or <answer>3</answer>", "answer_kind": "numeric"}
    golds = [row | {"ground_truth": gold} for gold in "123"]
    assert [score["accuracy"] for score in compute_score(golds, first_tag=True)] == [0.0, 1.0, 0.0]
    assert [score["accuracy"] for score in compute_score(golds)] == [1.0, 0.0, 0.0]  # the box
    assert final_answer("<answer> </answer>", "numeric", first_tag=True) is None
    assert final_answer(r"\boxed{5}", "numeric", first_tag=True) == "5"


def test_a_judge_is_asked_about_free_form_answers_alone() -> None:
    """It calls the first response right (10) and the second wrong (0); without a judge none is graded."""
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        (part,) = body["messages"][0]["content"]
        asked.append(part["text"])
        verdict = 10 if "[2014, 2016]" in part["text"].partition("RESPONSE")[2] else 0
        reply = json.dumps({"choices": [{"message": {"content": f"<score>{verdict}</score>"}}]}).encode()
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(reply)

    row = {"prompt": "Which?", "ground_truth": "[2014, 2016]", "answer_kind": "judged"}
    rows = [row | {"response": r"\boxed{[2014, 2016]}"}, row | {"response": r"\boxed{2014}"}]
    rows.append({"prompt": "Which?", "ground_truth": "B", "answer_kind": "choice", "response": r"\boxed{B}"})
    with local_server(answer) as address:
        scores = compute_score(rows, judge={"base_url": f"http://{address}/v1", "model": "judge"})
    assert [(score["accuracy"], score["judged"]) for score in scores] == [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]
    assert len(asked) == 2
    assert [(score["accuracy"], score["judged"]) for score in compute_score(rows)] == [
        (0.0, 0.0),
        (0.0, 0.0),
        (1.0, 0.0),
    ]
    with pytest.raises(RewardError, match="gave no verdict"):
        compute_score(rows, judge={"base_url": f"http://{address}/v1", "model": "judge", "retries": 0})
