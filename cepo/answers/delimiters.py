"""Removes from an answer what stands around it: the delimiters of mathematics, boxes, and trailing punctuation."""

from __future__ import annotations

import re

from cepo.answers.extraction import last_boxed_span

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_EQUATION = re.compile(
    r"\\begin\{((?:equation|align|aligned|gather|gathered|split|math|displaymath|multline)\*?)\}(.*)\\end\{\1\}",
    re.DOTALL,
)
"""An environment of one formula."""
_REPEATING_DECIMAL = re.compile(r"(\d+\.\d{0,12}?)(\d{1,6}?)\2+(?:\.\.\.|…|\\[lc]?dots)")
r"""`0.333...` and `0.1666\ldots`: digits that come at least twice before the points."""
_TRAILING_PUNCTUATION = re.compile(r"(?:\\[,;:!]|[.,;\s])+\Z")
_BROKEN_SPACE_COMMAND = re.compile(r"(?<!\\)\\\Z")
_DOLLAR_SIGN = re.compile(r"(?<!\\)\$")
_BOX_OR_BRACE = re.compile(r"(?:\\(?:boxed|fbox)\s*)?(?=\{)")
_BOX_OPENING = r"\boxed{"


def without_wrappers(text: str) -> str:
    """Returns the text without the delimiters of mathematics around it, a box, and punctuation behind it."""
    text = _REPEATING_DECIMAL.sub(r"\1\\overline{\2}", text)
    previous = None
    while text != previous:
        previous = text
        text = _without_outermost_wrapper(text)
    text = _BROKEN_SPACE_COMMAND.sub("", text)
    num_delimiters = text.count("$") - text.count(r"\$")
    if num_delimiters >= 2:  # one alone may be a sign of money
        text = _DOLLAR_SIGN.sub(" ", text)
    return text


def _without_outermost_wrapper(text: str) -> str:
    text = text.strip()
    equation = _EQUATION.fullmatch(text)
    if equation is not None and r"\\" not in equation[2]:
        return equation[2].replace("&", " ").strip()
    for opening, closing in _DELIMITERS:
        if not text.startswith(opening) or not text.endswith(closing) or len(text) < len(opening + closing):
            continue
        inner = text[len(opening) : -len(closing)]
        if opening in inner:
            continue  # two formulas, each with its own delimiters
        inner = inner.strip()
        is_escaped = closing == "$" and inner.endswith("\\")
        return text if is_escaped else inner
    box_or_brace = _BOX_OR_BRACE.match(text)
    if box_or_brace is not None:
        boxed = r"\boxed" + text[box_or_brace.end() :]
        if last_boxed_span(boxed) == (len(_BOX_OPENING), len(boxed) - 1):
            return boxed[len(_BOX_OPENING) : -1].strip()
    shorter = _TRAILING_PUNCTUATION.sub("", text)
    is_command_cut = shorter.endswith("\\")
    return text if is_command_cut else shorter
