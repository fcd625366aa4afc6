"""References put into conversations, and into prompts whose images are expanded already."""

from __future__ import annotations

import pytest

from cepo.errors import DataError
from cepo.integrations import adapter

IMAGE = 9
END = [7, 8]
STUDENT = [1, IMAGE, 2, 3, *END]
PROMPT = [1, IMAGE, IMAGE, IMAGE, 2, 3, *END]
"""As the engine read it: the image has three features."""


def spliced(prompt: list[int], student: list[int], teacher: list[int]) -> list[int]:
    return adapter.spliced(prompt, student, teacher, {IMAGE})


def test_a_reference_is_spliced_in_after_expanded_images() -> None:
    in_users_turn = [1, IMAGE, 2, 3, 4, 5, *END]
    assert spliced(PROMPT, STUDENT, in_users_turn) == [1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5, *END]
    behind_header = [*STUDENT, 4]
    assert spliced(PROMPT, STUDENT, behind_header) == [*PROMPT, 4]
    assert spliced(PROMPT, STUDENT, STUDENT) == PROMPT
    with_system_prompt = [6, 6, *PROMPT]  # which an agent loop has added
    assert spliced(with_system_prompt, STUDENT, behind_header) == [*with_system_prompt, 4]


def test_a_token_that_merges_with_the_reference_is_replaced() -> None:
    assert spliced(PROMPT, STUDENT, [1, IMAGE, 2, 33, 5, *END]) == [1, IMAGE, IMAGE, IMAGE, 2, 33, 5, *END]


@pytest.mark.parametrize("prompt", [[1, 2, IMAGE, IMAGE, 3, *END], [1, IMAGE, IMAGE, 2, 3, 7]])
def test_images_after_the_reference_and_cut_prompts_are_refused(prompt: list[int]) -> None:
    with pytest.raises(DataError, match="a reference cannot be put into a prompt"):
        spliced(prompt, [1, 2, IMAGE, 3, *END], [1, 2, 4, IMAGE, 3, *END])


def test_a_prompt_with_tools_has_no_view_without_images() -> None:
    """The tokens 5 and 6 are descriptions of tools; what follows the first image is expanded and not compared."""
    adapter.check_beginning(PROMPT, STUDENT, {IMAGE})
    adapter.check_beginning([1, 2, *END], [1, 2, *END], {IMAGE})
    refusal = "begins otherwise: it was cut, or an agent loop added"
    with pytest.raises(DataError, match=refusal):
        adapter.check_beginning([5, 6, *PROMPT], STUDENT, {IMAGE})
    with pytest.raises(DataError, match=refusal):
        adapter.check_beginning([1, 5, 6, 2, *END], [1, 2, *END], {IMAGE})
