"""Which part of a response is its final answer, and which options an answer names: the rows of `data/`."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from cepo.answers import chosen, final_answer, marked_answer, yes_or_no

DATA = Path(__file__).parent / "data"
RESPONSES = json.loads((DATA / "final_answers.json").read_text(encoding="utf-8"))
STATED = [*RESPONSES["Numbers"], *RESPONSES["Choices"], *RESPONSES["Yes or no"], *RESPONSES["Text"]]
LETTERS = json.loads((DATA / "letters.json").read_text(encoding="utf-8"))
SIZE = 200_000


@pytest.mark.parametrize("row", RESPONSES["Marks"], ids=lambda row: row["response"])
def test_the_last_whole_box_is_the_answer_and_else_the_last_tag(row: dict[str, Any]) -> None:
    assert marked_answer(row["response"]) == row["answer"]


@pytest.mark.parametrize("row", STATED, ids=lambda row: row["response"])
def test_a_mark_then_a_statement_then_a_line_counts(row: dict[str, Any]) -> None:
    assert final_answer(row["response"], row["kind"], row.get("choices", ())) == row["answer"]


@pytest.mark.parametrize("row", LETTERS, ids=lambda row: row["letters"] or "none")
def test_an_answer_names_these_letters(row: dict[str, Any]) -> None:
    misread_answers = [
        answer for answer in row["answers"] if chosen(answer, row["choices"]) != frozenset(row["letters"])
    ]
    assert misread_answers == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Yes", "yes"),
        (r"\text{no}", "no"),
        ("No, they are not.", "no"),
        ("Yes, and no other one is.", "yes"),
        ("The one is, no.", "no"),
        ("yes or no?", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_an_answer_is_the_word_yes_or_the_word_no(text: str, word: str | None) -> None:
    assert yes_or_no(text) == word


def searched_plainly(text: str) -> str | None:
    matches = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL | re.IGNORECASE)
    return (matches[-1].strip() or None) if matches else None


def test_the_last_tagged_answer_is_what_a_plain_search_finds() -> None:
    draw = random.Random(1)
    parts = ["<answer>", "</answer>", "<ANSWER>", "</Answer>", "a", " ", "\n", "<answer", "answer>", "</", "<"]
    for _ in range(20_000):
        text = "".join(draw.choices(parts, k=draw.randint(0, 12)))
        assert marked_answer(text) == searched_plainly(text), repr(text)


HOSTILE = [
    "<answer>", "</answer>", "<answer></answer", r"\boxed{", "{", "}", "\\", "answer is ", "answer:\n", " ", "^{", "</think>",
    "the ", "final answer\n", "option A is ", "**", "yes ", "答案", "选A",
    "answer is not A. it is B. ", "answer is A. No, it is 3 ", ". No, it is B", "answer is not ", " but ", "(A) red\n",
    "no, wait, ", "if the answer is 5. ", "**answer: A** x ", "4 (option C) ", "A. red ",
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("kind", ["numeric", "choice", "yes_no"])
def test_200_000_hostile_characters_are_read_in_linear_time(unit: str, kind: Any) -> None:
    text = unit * (SIZE // len(unit))
    began = time.process_time()
    marked_answer(text)
    final_answer(text, kind)
    assert time.process_time() - began < 4  # a quadratic search takes minutes
