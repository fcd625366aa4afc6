"""Finds what a chat template writes of a response itself, such as the `<think>` of a reasoning model."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAG = re.compile(r"[<\[◁]/?[^\s<>\[\]◁▷]+[>\]▷]")
_THOUGHT_TAG = re.compile(r"<[\w:.-]*(?:think|reason|thought)[\w:.-]*>", re.IGNORECASE)


def prefilled_text(before_earlier_answer: str, before_response: str, special_texts: Iterable[str]) -> str:
    r"""Returns the beginning of the response that the template writes after the assistant's header; empty without one.

    For `<|im_end|>\n<|im_start|>assistant\n<think>\n` it is `<think>\n`.

    Args:
        before_earlier_answer: what the template writes between a user's text and the answer of an earlier turn.
        before_response: what it writes after the last user's text.
        special_texts: the control tokens, which no response has.
    """
    start = _length_of_equal_beginning(before_earlier_answer, before_response)
    thought = _THOUGHT_TAG.search(before_response[:start])  # of a template that also writes one before earlier answers
    if thought is not None:
        start = thought.start()
    written = before_response[start:]
    if _TAG.search(written) is None:
        return ""
    for special in special_texts:
        last = before_response.rfind(special)
        if special and last >= 0 and last + len(special) > start:
            return ""
    return written


def _length_of_equal_beginning(first: str, second: str) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
