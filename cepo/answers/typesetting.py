"""Removal of what only typesets an answer: delimiters, boxes, fonts, sizes and gaps; and one command for each sign."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cepo.answers.boxes import last_boxed_span
from cepo.answers.lexer import Group, Node, NodeCursor, Token, with_space
from cepo.answers.tables import SIGNS

DEGREE = r"\degree"
"""The command that stands for every spelling of the degree sign."""

_DELIMITERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("`", "`"),
    ('"', '"'),
    ("“", "”"),
)
_TRAILING_PUNCTUATION = re.compile(r"(?:\\[,;:!]|[.,;\s])+\Z")
_BROKEN_SPACE_COMMAND = re.compile(r"(?<!\\)\\\Z")
_DOLLAR_SIGN = re.compile(r"(?<!\\)\$")
_BOX_OR_BRACE = re.compile(r"(?:\\(?:boxed|fbox)\s*)?(?=\{)")
_BOX_OPENING = r"\boxed{"


def without_wrappers(text: str) -> str:
    """Returns the text without the delimiters of mathematics around it, a box, and punctuation behind it."""
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


_UPRIGHT = frozenset(SIGNS["upright"].split())
_UNWRAPPED = frozenset(SIGNS["unwrapped"].split())
_DROPPED = frozenset(SIGNS["dropped"].split())
_SYNONYMS: dict[str, str] = SIGNS["commands"]
_UPRIGHT_SWITCHES = {r"\bf", r"\rm"}


def without_typesetting(nodes: Sequence[Node]) -> list[Node]:
    """Drops fonts, sizes and gaps, and unwraps what they were put on."""
    return _Reader(nodes, upright=False).whole()


class _Reader(NodeCursor):
    """Reads nodes one after the other into a list without typesetting.

    `_spaced` is whether a space, or a command that was dropped, stands before the next node; `_upright` whether the
    letters are upright.
    """

    def __init__(self, nodes: Sequence[Node], upright: bool) -> None:
        super().__init__(nodes)
        self._upright = upright
        self._spaced = False
        self._result: list[Node] = []

    def whole(self) -> list[Node]:
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            self._place += 1
            self._spaced = self._spaced or node.spaced
            if isinstance(node, Group):
                body = _Reader(node.body, self._upright).whole()
                self._append(Group(tuple(body), self._spaced))
            elif node.kind == "command":
                self._command(node)
            else:
                self._plain(node)
        return self._result

    def _append(self, *nodes: Node) -> None:
        self._result.extend(nodes)
        self._spaced = False

    def _plain(self, node: Token) -> None:
        self._append(Token(node.kind, _SYNONYMS.get(node.text, node.text), self._spaced, self._upright))

    def _command(self, node: Token) -> None:
        name = node.text
        if name in _DROPPED:
            self._drop(name)
        elif name in _UPRIGHT or name in _UNWRAPPED:
            self._unwrap(name)
        else:
            self._plain(node)

    def _drop(self, name: str) -> None:
        """Drops a command without argument, and of `\\left.` also the point, which stands for no bracket."""
        if name in _UPRIGHT_SWITCHES:
            self._upright = True
        if name in (r"\left", r"\right"):
            self._skip(".")
        self._spaced = True

    def _unwrap(self, name: str) -> None:
        """Replaces a font command by its argument: words where it makes letters upright, else a group."""
        argument = self._peek()
        if not isinstance(argument, Group):
            self._spaced = True
            return
        self._place += 1
        is_upright = name in _UPRIGHT
        inner = _Reader(argument.body, self._upright or is_upright).whole()
        if is_upright and inner:
            self._append(with_space(inner[0]), *inner[1:])
            self._spaced = True
        else:
            self._append(Group(tuple(inner), self._spaced))
