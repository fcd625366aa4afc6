"""The benchmark reward: kinds of answers, columns of a row, and what only a judge can grade."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from local_server import local_server

from cepo.errors import RewardError
from cepo.rewards.benchmark import compute_score, final_answer, is_right, kind_of, options_in_text
from cepo.rewards.math import compute_score as math_score

COLOURS = ("red", "blue", "green", "orange")
DATA = Path(__file__).parents[1] / "answers" / "data"
ROWS = json.loads((DATA / "equal_answers.json").read_text(encoding="utf-8"))
PAIRS = json.loads((DATA / "pairs.json").read_text(encoding="utf-8"))
RESPONSES = json.loads((DATA / "graded_responses.json").read_text(encoding="utf-8"))


def accuracy_of(row: dict[str, Any], **settings: Any) -> float:
    return compute_score([row], **settings)[0]["accuracy"]


@pytest.mark.parametrize("section", ROWS)
def test_what_the_math_reward_refuses_is_refused(section: str) -> None:
    """Without a tolerance both rewards have one comparison."""
    accepted: list[tuple[str, str]] = []
    for row in ROWS[section]:
        for answer in row["different"]:
            sample = {"response": rf"\boxed{{{answer}}}", "ground_truth": row["truth"]}
            assert math_score([sample])[0]["accuracy"] == 0.0
            if accuracy_of(sample):
                accepted.append((answer, row["truth"]))
    assert accepted == []


@pytest.mark.parametrize("section", PAIRS)
def test_a_wrong_pair_is_refused_by_both_rewards(section: str) -> None:
    accepted: list[Any] = []
    for row in PAIRS[section]:
        sample = {"response": rf"\boxed{{{row['answer']}}}", "ground_truth": row["truth"]}
        if not row["right"] and (accuracy_of(sample) or math_score([sample])[0]["accuracy"]):
            accepted.append(row)
    assert accepted == []


@pytest.mark.parametrize("section", RESPONSES)
def test_a_response_is_graded_as_a_reader_would(section: str) -> None:
    """Statements, prose behind numbers, yes or no, percent, Chinese; each row is a response with its verdict."""
    misgraded: list[str] = []
    for row in RESPONSES[section]:
        sample = row | {"answer_kind": row["kind"], "ground_truth": row["truth"]}
        if accuracy_of(sample) != float(row["right"]):
            misgraded.append(row["response"])
    assert misgraded == []


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
    ("answer", "truth", "right"),
    [("B", "B", True), ("blue", "B", True), ("A", "B", False), ("A", "A, C", False), ("C, A", "A, C", True)],
)
def test_a_choice_is_right_by_its_letters(answer: str, truth: str, right: bool) -> None:
    assert is_right(answer, truth, "choice", COLOURS) is right


@pytest.mark.parametrize(
    ("answer", "truth", "tolerance", "right"),
    [
        ("2.094", "2.0944", 1e-3, True),
        ("2.094", "2.0944", 0, False),
        (r"\frac{2\pi}{3}", "2.0944", 1e-3, True),
        ("2.0955", "2.0944", 1e-3, False),
        ("2:5", "0.4", 1e-3, True),
        ("more than 2", "2", 1e-3, False),
        ("12 m", "12 cm", 1e-3, False),
        ("€12.50", "$12.50", 1e-3, False),
    ],
)
def test_a_number_is_right_within_the_tolerance(answer: str, truth: str, tolerance: float, right: bool) -> None:
    assert is_right(answer, truth, "numeric", (), tolerance) is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("(3,1)", "(3.000, 1.000)", True),
        ("(-2.7774, -1.136)", "(-2.777, -1.136)", True),
        ("(3, 2)", "(3.000, 1.000)", False),
        ("(3, 1, 0)", "(3.000, 1.000)", False),
        ("sep", "Sep", True),
        ("Apr", "Aug", False),
        ("bs", "BS", True),
        ("y=4", "y = 4", True),
    ],
)
def test_text_is_right_in_any_case_and_points_if_near(answer: str, truth: str, right: bool) -> None:
    assert is_right(answer, truth, "text", (), 1e-3) is right


@pytest.mark.parametrize(
    ("truth", "kind"),
    [
        ("B", "choice"),
        ("A, C", "choice"),
        ("60", "numeric"),
        (r"5 \sqrt { 3 }", "numeric"),
        ("Sep", "text"),
        ("K", "text"),
    ],
)
def test_the_kind_of_an_answer_that_no_column_tells(truth: str, kind: str) -> None:
    assert kind_of(truth) == kind


def test_the_columns_of_a_row_decide_how_it_is_graded() -> None:
    sample = {"response": r"\boxed{blue}", "response_length": 3, "ground_truth": "B"}
    coloured = sample | {"answer_kind": "choice", "choices": list(COLOURS), "tolerance": None}
    number = sample | {"response": r"\boxed{1.2}", "ground_truth": "1.25", "answer_kind": "numeric", "tolerance": 0.05}
    assert [score["overall"] for score in compute_score([sample, coloured, number])] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (r"\boxed{Yes}", "yes"),
        ("Yes, there is a dog.\nIt lies in the middle.", "yes"),
        ("It may be.\nNo", "no"),
        ("The picture is dark.", None),
    ],
)
def test_a_yes_or_no_question_has_one_right_word(response: str, word: str | None) -> None:
    for truth in ("yes", "no"):
        row = {"response": response, "answer_kind": "yes_no", "ground_truth": truth}
        assert accuracy_of(row) == float(word == truth)


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
    assert accuracy_of(row) == is_correct


def test_an_alternative_answer_is_right() -> None:
    row = {
        "response": r"\boxed{3.5}",
        "ground_truth": "24/7",
        "answer_kind": "numeric",
        "alternatives": ["3.429", "3.5"],
    }
    assert accuracy_of(row) == 1.0
    assert accuracy_of(row | {"alternatives": None}) == 0.0


def test_the_first_tag_counts_if_asked() -> None:
    row = {"response": r"<think>\boxed{1}</think><answer>2</answer> or <answer>3</answer>", "answer_kind": "numeric"}
    assert [accuracy_of(row | {"ground_truth": truth}, first_tag=True) for truth in "123"] == [0.0, 1.0, 0.0]
    assert [accuracy_of(row | {"ground_truth": truth}) for truth in "123"] == [0.0, 0.0, 1.0]
    assert final_answer("<answer> </answer>", "numeric", first_tag=True) is None
    assert final_answer(r"\boxed{5}", "numeric", first_tag=True) == "5"


def test_a_judge_is_asked_about_free_form_answers_alone() -> None:
    """It calls the first response right (10) and the second wrong (0); without a judge none is graded."""
    questions: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["Content-Length"])
        body = json.loads(handler.rfile.read(length))
        (part,) = body["messages"][0]["content"]
        question = part["text"]
        questions.append(question)
        response = question.partition("RESPONSE")[2]
        verdict = 10 if "[2014, 2016]" in response else 0
        message = {"content": f"<score>{verdict}</score>"}
        reply = json.dumps({"choices": [{"message": message}]})
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(reply.encode())

    row = {"prompt": "Which?", "ground_truth": "[2014, 2016]", "answer_kind": "judged"}
    right = row | {"response": r"\boxed{[2014, 2016]}"}
    wrong = row | {"response": r"\boxed{2014}"}
    of_choices = {"prompt": "Which?", "ground_truth": "B", "answer_kind": "choice", "response": r"\boxed{B}"}
    rows = [right, wrong, of_choices]
    with local_server(answer) as address:
        judge = {"base_url": f"http://{address}/v1", "model": "judge"}
        scores = compute_score(rows, judge=judge)
    assert [score["accuracy"] for score in scores] == [1.0, 0.0, 1.0]
    assert [score["judged"] for score in scores] == [1.0, 1.0, 0.0]
    assert len(questions) == 2
    without_judge = compute_score(rows)
    assert [score["accuracy"] for score in without_judge] == [0.0, 0.0, 1.0]
    assert [score["judged"] for score in without_judge] == [0.0, 0.0, 0.0]
    with pytest.raises(RewardError, match="gave no verdict"):
        compute_score(rows, judge=judge | {"retries": 0})
