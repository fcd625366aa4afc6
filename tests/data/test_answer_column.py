"""Right answers and solutions of other trainers' rows, as teachers read them."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import numpy
import pytest
import torch

from cepo.data.answer_column import answer_text, solution_text
from cepo.data.row_parser import cell_text
from cepo.errors import DataError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("15", "15"),
        ([" 15 "], "15"),
        ([["15"]], "15"),
        (("15",), "15"),
        (numpy.array(["15"], dtype=object), "15"),
        (15, "15"),
        (15.0, "15"),
        ([15.0], "15"),
        (numpy.float64(2.5), "2.5"),
        (torch.tensor([3]), "3"),
        (["15", "1/2"], '["15", "1/2"]'),
        (numpy.array([15.0, 2.5]), "[15, 2.5]"),
        ([numpy.int64(1), "é"], '[1, "é"]'),
        ({"target": 24.0, "numbers": numpy.array([1, 2])}, '{"target": 24, "numbers": [1, 2]}'),
        ([{"x": 1}], '{"x": 1}'),
        ([1e-7, 2.0, 1e20], "[0.0000001, 2, 100000000000000000000]"),
        ([date(2024, 1, 2), "1"], '["2024-01-02", "1"]'),
    ],
    ids=str,
)
def test_an_answer_is_one_text_and_never_pythons_spelling(value: Any, text: str) -> None:
    assert answer_text(value, "a cell") == text
    assert solution_text(value, "a cell") == text


@pytest.mark.parametrize("value", [None, "", "  ", [], [""], [None], {}, numpy.array([])], ids=str)
def test_an_empty_answer_is_refused_an_empty_solution_is_none(value: Any) -> None:
    with pytest.raises(DataError, match="column 'answer' is empty"):
        answer_text(value, "column 'answer'")
    assert solution_text(value, "a cell") is None


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"x": {1, 2}}, "a cell holds a set; accepted"),
        ([b"1", b"2"], "a cell holds a bytes; accepted"),
        ([math.inf, 1.0], "a cell is infinite; accepted"),
    ],
    ids=str,
)
def test_values_without_a_text_of_their_own_are_refused(value: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        answer_text(value, "a cell")


def test_a_list_of_answers_is_written_as_in_our_own_trainer() -> None:
    answers: list[Any] = [1e-7, 2.0, "1/2", 0.1]
    assert answer_text(answers, "a cell") == cell_text(answers, "answer") == '[0.0000001, 2, "1/2", 0.1]'
