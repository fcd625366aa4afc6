"""Grades every total that a response states, and marks the tokens that decide its outcome: an oracle that costs nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ANSWER_MARK = "Answer:"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A number that a response states: a running total, or the answer at its end.

    `first_wrong` is the place in the text of its first character that differs from the right number; None if it is right.
    """

    start: int
    end: int
    is_answer: bool
    first_wrong: int | None

    @property
    def is_right(self) -> bool:
        """Whether it is the problem's own number."""
        return self.first_wrong is None


def totals_of(solution: str) -> list[int]:
    """Returns the running totals of a worked solution, which states each once and the last again as the answer."""
    numbers = [int(number) for number in _NUMBER.findall(solution)]
    if len(numbers) < 2 or numbers[-1] != numbers[-2]:
        raise ValueError(f"{solution!r} does not end with its last total as the answer")
    return numbers[:-1]


def stated_answer(response: str) -> str | None:
    """Returns the number right after the last `Answer:`; None if there is none."""
    _, mark, rest = response.rpartition(ANSWER_MARK)
    found = _NUMBER.match(rest.lstrip(" "))
    if not mark or found is None:
        return None
    return found[0]


def statements(response: str, totals: Sequence[int]) -> list[Statement]:
    """Returns the numbers of a response in their order, graded by the right totals.

    Those before `Answer:` are running totals, of which further ones than there are steps are wrong from their first
    character; the first one after it is the answer, with which the list ends.
    """
    answer_at = response.rfind(ANSWER_MARK)
    if answer_at < 0:
        answer_at = len(response)
    graded: list[Statement] = []
    for found in _NUMBER.finditer(response):
        is_answer = found.start() > answer_at
        expected = ""
        if is_answer:
            expected = str(totals[-1])
        elif len(graded) < len(totals):
            expected = str(totals[len(graded)])
        graded.append(
            Statement(
                start=found.start(),
                end=found.end(),
                is_answer=is_answer,
                first_wrong=None if found[0] == expected else found.start() + _first_difference(found[0], expected),
            )
        )
        if is_answer:
            break
    return graded


def _first_difference(text: str, expected: str) -> int:
    """Returns the first place at which `text` differs from `expected`; its last one if it is the beginning of that."""
    for place, (letter, right) in enumerate(zip(text, expected, strict=False)):
        if letter != right:
            return place
    return min(len(expected), len(text) - 1)


def number_places(response: str, totals: Sequence[int]) -> list[int]:
    """Returns the places of all digits that a response states."""
    places: list[int] = []
    for statement in statements(response, totals):
        places += range(statement.start, statement.end)
    return places


def decisive_places(response: str, totals: Sequence[int]) -> list[int]:
    """Returns the places that decided the outcome.

    In a response that states a wrong number it is that number's first wrong digit; in one that states all numbers and the
    answer, all of their digits. A response that ends before, and is wrong for that, has none.
    """
    graded = statements(response, totals)
    for statement in graded:
        if statement.first_wrong is not None:
            return [statement.first_wrong]
    if not graded or not graded[-1].is_answer:
        return []
    return number_places(response, totals)


def tokens_at(places: Sequence[int], pieces: Sequence[str]) -> list[bool]:
    """Returns for each token, given the texts of all, whether it has one of these places of the whole text."""
    wanted = set(places)
    marked: list[bool] = []
    start = 0
    for piece in pieces:
        end = start + len(piece)
        marked.append(not wanted.isdisjoint(range(start, end)))
        start = end
    return marked


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Returns the text of each token, which together are the response; control tokens have none."""
    return [tokenizer.decode([token], skip_special_tokens=True) for token in token_ids]
