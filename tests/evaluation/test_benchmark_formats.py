"""Rows of each benchmark, written by hand, and what is asked and graded of them."""

from __future__ import annotations

from typing import Any

from benchmark_rows import DYNAMATH, MATHVISTA, MMMU, PICTURE, WEMATH

from cepo.evaluation import formats


def graded(problem: dict[str, Any]) -> tuple[Any, ...]:
    return problem["answer_kind"], problem["answer"], problem.get("choices", [])


def test_mathvistas_answers_are_graded_by_their_type() -> None:
    choice = MATHVISTA | {"question_type": "multi_choice", "answer_type": "text", "answer": "6cm", "precision": None}
    assert graded(formats.mathvista(choice | {"choices": ["5cm", "6cm"]})) == ("choice", "B", ["5cm", "6cm"])
    number = formats.mathvista(MATHVISTA)
    assert graded(number) == ("numeric", "1.2", [])
    assert number["decimals"] == 1
    assert number["problem"] == "How far?\nGive the answer as a number with 1 decimal."
    whole = formats.mathvista(MATHVISTA | {"answer_type": "integer", "answer": 4, "precision": None, "unit": "years"})
    assert graded(whole) == ("numeric", "4", [])
    assert whole["decimals"] is None
    assert whole["problem"] == "How far? (Unit: years)\nGive the answer as an integer."
    assert graded(formats.mathvista(MATHVISTA | {"answer_type": "list", "answer": "[2014, 2016]"}))[0] == "judged"
    assert number["categories"]["skills"] == ["algebraic", "scientific"]
    assert number["categories"]["task"] == ["textbook question answering"]


def test_mmmus_pictures_stand_at_their_first_mention() -> None:
    row = MMMU | {"image_1": "one", "image_2": "two", "image_3": "three", "question": "Is <image 2> or <image 2>?"}
    problem = formats.mmmu(row | {"options": "['<image 1>', 'none']"})
    assert problem["images"] == ["three", "two", "one"]
    assert problem["problem"].startswith("<image>Is <image> or image 2?\nChoices:\nA. <image>\nB. none\n")
    assert problem["categories"] == {
        "discipline": ["Science"], "subject": ["Biology"], "subfield": ["Botany"], "topic_difficulty": ["Easy"],
    }  # fmt: skip


def test_mmmus_short_answers_may_have_several_spellings() -> None:
    short = MMMU | {"question_type": "open", "options": "[]"}
    assert graded(formats.mmmu(short | {"answer": "C"})) == ("text", "C", [])
    several = formats.mmmu(short | {"answer": "['24/7', '3.429']"})
    assert several["answer_kind"] == "numeric"
    assert several["answer"] == "24/7"
    assert several["alternatives"] == ["3.429"]


def test_wemaths_rows_know_their_group_and_step() -> None:
    problem = formats.wemath(WEMATH)
    assert graded(problem) == ("choice", "B", ["3", "4", "5", "No correct answer"])
    assert problem["cluster"] == "2steps_1"
    assert problem["categories"] == {"steps": ["1-step"], "knowledge_concept": ["Length"]}
    assert formats.wemath(WEMATH | {"key": "3steps_multi"})["categories"]["steps"] == ["3-step"]
    odd = formats.wemath(WEMATH | {"option": "A. 45° B. 60° ;C. 120°; D. No correct answer"})
    assert graded(odd) == ("choice", "B", [])
    assert "A. 45° B. 60° ;C. 120°" in odd["problem"]


def test_dynamaths_numbers_have_a_tolerance_and_a_seed() -> None:
    problem = formats.dynamath(DYNAMATH)
    assert graded(problem) == ("numeric", "2.5", [])
    assert problem["tolerance"] == 1e-3
    assert problem["cluster"] == "7"
    choice = DYNAMATH | {"answer_type": "multiple choice", "question": "Is it (A) even (B) odd", "ground_truth": "B"}
    assert graded(formats.dynamath(choice)) == ("choice", "B", ["even", "odd"])
    assert PICTURE["bytes"]
