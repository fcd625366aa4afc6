"""References put into conversations, and into prompts whose images are expanded already."""

from __future__ import annotations

import pytest

from cepo.errors import DataError
from cepo.integrations import gathered

IMAGE, END = 9, [7, 8]
STUDENT = [1, IMAGE, 2, 3, *END]
PROMPT = [1, IMAGE, IMAGE, IMAGE, 2, 3, *END]
"""As the engine read it: the image has three features."""


def spliced(prompt: list[int], student: list[int], teacher: list[int]) -> list[int]:
    return gathered.spliced(prompt, student, teacher, {IMAGE})


def test_a_reference_is_spliced_in_after_expanded_images() -> None:
    assert spliced(PROMPT, STUDENT, [1, IMAGE, 2, 3, 4, 5, *END]) == [1, IMAGE, IMAGE, IMAGE, 2, 3, 4, 5, *END]
    assert spliced(PROMPT, STUDENT, [*STUDENT, 4]) == [*PROMPT, 4], "after the assistant header"
    assert spliced(PROMPT, STUDENT, STUDENT) == PROMPT
    assert spliced([6, 6, *PROMPT], STUDENT, [*STUDENT, 4])[:2] == [6, 6], "a system prompt that the agent loop added"


def test_a_token_that_merges_with_the_reference_is_replaced() -> None:
    assert spliced(PROMPT, STUDENT, [1, IMAGE, 2, 33, 5, *END]) == [1, IMAGE, IMAGE, IMAGE, 2, 33, 5, *END]


@pytest.mark.parametrize("prompt", [[1, 2, IMAGE, IMAGE, 3, *END], [1, IMAGE, IMAGE, 2, 3, 7]])
def test_images_after_the_reference_and_cut_prompts_are_refused(prompt: list[int]) -> None:
    with pytest.raises(DataError, match="a reference cannot be put into a prompt"):
        spliced(prompt, [1, 2, IMAGE, 3, *END], [1, 2, 4, IMAGE, 3, *END])


def test_a_prompt_with_tools_has_no_view_without_images() -> None:
    """The tokens 5 and 6 are descriptions of tools; what follows the first image is expanded and not compared."""
    gathered.check_beginning(PROMPT, STUDENT, {IMAGE})
    gathered.check_beginning([1, 2, *END], [1, 2, *END], {IMAGE})
    for prompt, student in (([5, 6, *PROMPT], STUDENT), ([1, 5, 6, 2, *END], [1, 2, *END])):
        with pytest.raises(DataError, match="begins otherwise: it was cut, or an agent loop added"):
            gathered.check_beginning(prompt, student, {IMAGE})
