"""The tensors of a batch, made from values by response."""

from __future__ import annotations

import torch

from cepo.algorithms.masking import at_last_token, response_mask_of, with_rows


def test_the_mask_is_true_on_each_rows_tokens() -> None:
    assert response_mask_of(torch.tensor([1, 3, 2])).tolist() == [
        [True, False, False],
        [True, True, True],
        [True, True, False],
    ]


def test_rows_without_tokens_have_a_mask_of_width_1() -> None:
    """A damaged trace can have them, and a tensor of width 0 has no last token."""
    assert response_mask_of(torch.tensor([0, 0])).tolist() == [[False], [False]]


def test_the_outcome_is_at_the_last_token_of_the_mask() -> None:
    """In a response with a tool's tokens the mask has gaps, and may end before the response."""
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    assert at_last_token(torch.tensor([0.5, 2.0]), mask).tolist() == [[0, 0.5, 0, 0], [0, 0, 2, 0]]


def test_rows_replace_the_students_and_leave_its_tensor() -> None:
    students = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]])
    teachers = with_rows(students, {0: torch.tensor([-0.25, -0.5])})
    assert teachers.tolist() == [[-0.25, -0.5, 0], [-3, -4, -5]]
    assert students.tolist() == [[-1, -2, 0], [-3, -4, -5]]


def test_without_rows_no_tensor_is_made() -> None:
    students = torch.zeros(2, 3)
    assert with_rows(students, {}) is students
