"""Finds a right and a wrong response that begin alike, and colours the words in which they differ."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence

from cepo.report.html_page import Section
from cepo.report.responses import RecordedResponse, ResponseGroup
from cepo.report.shown_responses import ColouredRow, ColouredToken, CreditedResponse, response_title, visible

_GROUPS_COMPARED = 300
_LONGEST = 6_000
"""Characters of a response that is compared word by word."""
_SHADE = 60


def clearest_pair_section(groups: Sequence[ResponseGroup]) -> Section | None:
    """Returns the part of a page with the pair of the last groups that begins alike for longest; None without a pair."""
    pairs = itertools.chain.from_iterable(map(_pairs, groups[-_GROUPS_COMPARED:]))
    right, wrong = max(pairs, key=_common_share, default=(None, None))
    if right is None or wrong is None:
        return None
    return Section(
        title="The clearest pair",
        notes=["A right and a wrong response to one prompt; coloured words are those that the other one has not."],
        responses=[_shown(right, wrong), _shown(wrong, right)],
        closed=False,
    )


def _pairs(group: ResponseGroup) -> Iterator[tuple[RecordedResponse, RecordedResponse]]:
    right = [response for response in group.responses if response.right]
    wrong = [response for response in group.responses if response.right is False]
    for right_response, wrong_response in itertools.product(right[:4], wrong[:4]):
        right_text = right_response.response
        wrong_text = wrong_response.response
        if right_text != wrong_text and max(len(right_text), len(wrong_text)) <= _LONGEST:
            yield right_response, wrong_response


def _common_share(pair: tuple[RecordedResponse, RecordedResponse]) -> float:
    right, wrong = (response.response for response in pair)
    equal = itertools.takewhile(lambda letters: letters[0] == letters[1], zip(right, wrong, strict=False))
    return sum(1 for _ in equal) / max(1, len(right), len(wrong))


def _words(text: str) -> list[str]:
    return re.findall(r"\s*(?:\w+|[^\w\s])|\s+\Z", text)


def _shown(response: RecordedResponse, other: RecordedResponse) -> CreditedResponse:
    words = _words(response.response)
    matcher = difflib.SequenceMatcher(a=words, b=_words(other.response), autojunk=False)
    shared: set[int] = set()
    for block in matcher.get_matching_blocks():
        shared.update(range(block.a, block.a + block.size))
    tokens: list[ColouredToken] = []
    for place, word in enumerate(words):
        share, meaning = (0, "in both responses") if place in shared else (_SHADE, "in this response alone")
        side = "more" if response.right else "less"
        tokens.append(ColouredToken(text=visible(word), side=side, percent=share, help=meaning))
    return CreditedResponse(
        title=response_title(response.right, response.reward, step=response.step),
        problem=visible(response.prompt),
        ground_truth=visible(response.ground_truth or "not recorded"),
        image=None,
        rows=[ColouredRow(label="words", tokens=tokens)],
    )
