"""Finds the first place of a response at which its answer would have been right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cepo.answers import equal

_BEGUN = re.compile(r"\w[.,]?\Z")
_GOES_ON = re.compile(r"[.,]?\w")
"""The end of a text in which a word or number may have begun, and the beginning of one in which it goes on: 14 and .5."""


def tokens_past_right_answer(
    texts: Sequence[str], ground_truth: str, extract: Callable[[str], str | None]
) -> int | None:
    """Returns the number of tokens after the first place at which the answer is right; None if it never is.

    `texts` are those of a response's tokens. A place lies after a token and splits neither a word nor a number, so that
    the 1 of `14` is no answer. `extract` finds the answer of the text before a place, as it does for a whole response.
    Its calls for T tokens read T^2 / 2 token texts together.
    """
    is_right: dict[str, bool] = {}  # by answer, of which a response has few
    response = "".join(texts)
    length = 0
    for number, text in enumerate(texts, start=1):
        length += len(text)
        before = response[:length]
        if _BEGUN.search(before) and _GOES_ON.match(response, length):
            continue
        answer = extract(before)
        if answer is None:
            continue
        if answer not in is_right:
            is_right[answer] = equal(answer, ground_truth)
        if is_right[answer]:
            return len(texts) - number
    return None
