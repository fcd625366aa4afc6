r"""Marked answers of a response: the last `\boxed{}`, else the last `<answer>`."""

from __future__ import annotations

import re

_ANSWER_TAGS = re.compile(r"</?answer>", re.IGNORECASE)
_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*\{"  # a box in braces
    r"|\\(?:boxed|fbox)(?:\s*(?=[-\d])|\s+)(?P<bare>-?(?:\d[\d.,]*\d|\d)|[A-Za-z])(?=[\s$.,;)]|\Z)"  # \boxed 7
    r"|\\.|[{}]",
    re.DOTALL,
)


def last_marked_answer(response: str) -> str | None:
    r"""Returns the text of the last `\boxed{...}` with matching braces, else of the last `<answer>` tag, else None.

    `\fbox{...}` counts like `\boxed{...}`, and so does a bare number or letter, as in `\boxed 7`. Of nested boxes the
    outermost counts. If the last answer is blank, the result is None, never the string "None".
    """
    span = last_boxed_span(response) or _last_tagged_span(response)
    if span is None:
        return None
    start, stop = span
    return response[start:stop].strip() or None


def last_boxed_span(text: str) -> tuple[int, int] | None:
    """Returns the span of the content of the box that closes last: the last one, or the outermost of nested ones.

    It makes a single pass, because a degenerate response may open thousands of boxes. Escaped braces do not count.
    """
    last_span: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where the content of each open box begins; None for other braces
    for token in _BOX.finditer(text):
        if token["bare"] is not None:
            last_span = token.span("bare")
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == r"\{":
            continue
        elif token[0].endswith("{"):
            open_braces.append(token.end())
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                last_span = (start, token.start())
    return last_span


def _last_tagged_span(text: str) -> tuple[int, int] | None:
    """Returns the span of the last closed `<answer>` in one pass, because a response may open thousands of them."""
    last_span: tuple[int, int] | None = None
    start: int | None = None  # where the content of the open tag begins
    for tag in _ANSWER_TAGS.finditer(text):
        is_closing = tag[0].startswith("</")
        if start is None and not is_closing:
            start = tag.end()
        elif start is not None and is_closing:
            last_span = (start, tag.start())
            start = None
    return last_span
