"""Tokens of an answer, the tree of groups in braces that they form, and its way back into text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["number", "letters", "command", "sign"]

OPENING_BRACKETS = ("(", "[", r"\{")
CLOSING_BRACKETS = (")", "]", r"\}")
THREE_DIGITS = re.compile(r"\d{3}(?:\.\d+)?")


@dataclass(frozen=True)
class Token:
    r"""A number (`12.5`), a run of letters, a command (`\frac`) or another character.

    Attributes:
        spaced: whether a space stands before it.
        upright: whether it stands in `\text{}` or `\mathrm{}`, where letters are words or units and not variables.
    """

    kind: Kind
    text: str
    spaced: bool = False
    upright: bool = False


@dataclass(frozen=True)
class Group:
    """What stands between a pair of braces."""

    body: tuple[Node, ...]
    spaced: bool = False


Node = Token | Group


def is_sign(node: Node, *texts: str) -> bool:
    """Returns whether a node is one of these signs or commands."""
    return isinstance(node, Token) and node.kind in ("sign", "command") and node.text in texts


def is_number(node: Node) -> bool:
    """Returns whether a node is a number token."""
    return isinstance(node, Token) and node.kind == "number"


def is_letters(node: Node) -> bool:
    """Returns whether a node is a run of letters."""
    return isinstance(node, Token) and node.kind == "letters"


def text_of(node: Node) -> str:
    """Returns the text of a token, and an empty one for a group."""
    return node.text if isinstance(node, Token) else ""


def word_of(node: Node | None) -> str:
    """Returns the text of letters in small letters, and an empty one for other nodes."""
    return node.text.lower() if isinstance(node, Token) and node.kind == "letters" else ""


def with_space(node: Node, spaced: bool = True) -> Node:
    """Returns the node with or without a space before it."""
    return node if node.spaced == spaced else replace(node, spaced=spaced)


_RELATIONS = {"<=": r"\leq", ">=": r"\geq", "!=": r"\neq"}
_TOKEN = re.compile(
    r"(?P<nothing>\\!)|(?P<space>\s+|~|\\[,;:>/ ]|\\\s)"
    r"|(?P<number>\d+\.\d+|\.\d+|\d+)"
    r"|(?P<letters>[A-Za-z]+|[\u4e00-\u9fff]+)"
    r"|(?P<relation><=|>=|(?<=[\sA-Za-z])!=)"  # `5!=120` is a factorial
    r"|(?P<command>\\(?:[A-Za-z]+\*?|\\|.))"
    r"|(?P<sign>.)",
    re.DOTALL,
)


def read_nodes(text: str) -> list[Node]:
    r"""Returns the tree of a text; a brace without partner is a sign."""
    bodies: list[list[Node]] = [[]]  # the nodes of the text and of each brace that is open
    spaces: list[bool] = []  # whether a space stands before each of these braces
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "nothing":
            continue
        if kind == "space":
            spaced = True
            continue
        if kind == "relation":
            bodies[-1].append(Token("command", _RELATIONS[match[0]], spaced))
        elif match[0] == "{":
            bodies.append([])
            spaces.append(spaced)
        elif match[0] == "}" and spaces:
            body = bodies.pop()
            bodies[-1].append(Group(tuple(body), spaces.pop()))
        else:
            bodies[-1].append(Token(kind, match[0], spaced))  # type: ignore[arg-type]
        spaced = False
    while spaces:
        body = bodies.pop()
        bodies[-1].append(Token("sign", "{", spaces.pop()))
        bodies[-1].extend(body)
    return bodies[0]


def written(nodes: Sequence[Node]) -> str:
    """Returns the text of nodes, without spaces but where it would be read differently without them."""
    text = ""
    previous: Node | None = None
    before_previous: Node | None = None
    for node in nodes:
        if previous is not None and _needs_a_space(before_previous, previous, node):
            text += " "
        text += "{" + written(node.body) + "}" if isinstance(node, Group) else node.text
        before_previous = previous
        previous = node
    return text


def _needs_a_space(before_previous: Node | None, previous: Node, node: Node) -> bool:
    """Returns whether a node directly behind the previous one would be read differently."""
    if isinstance(previous, Group) or isinstance(node, Group):
        return False
    if is_number(previous) and is_number(node):
        return node.spaced  # `6 0` is not 60
    if is_letters(previous) and is_letters(node):
        return node.spaced  # `no solution` has two words
    ends_in_letter = previous.kind == "command" and previous.text[-1:].isalpha()
    if ends_in_letter and node.text[:1].isalpha():
        return True
    if before_previous is None or not is_number(before_previous):
        return False
    if is_sign(previous, ",") and is_number(node):
        return THREE_DIGITS.fullmatch(node.text) is not None  # `1, 234` is not 1234
    is_e = previous.text in ("e", "E")
    return is_e and (is_number(node) or is_sign(node, "+", "-"))  # `2e -3` is not 0.002


class NodeCursor:
    """A place in a sequence of nodes, which moves forward."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._place: int = 0

    def _peek(self, ahead: int = 0) -> Node | None:
        """Returns the next node, or the one `ahead` nodes behind it; None behind the last one."""
        place = self._place + ahead
        return self._nodes[place] if place < len(self._nodes) else None

    def _next_is(self, *texts: str) -> bool:
        """Returns whether the next node is one of these signs or commands."""
        node = self._peek()
        return node is not None and is_sign(node, *texts)

    def _skip(self, *texts: str) -> bool:
        """Moves past the next node if it is one of these signs or commands; returns whether it was."""
        is_next = self._next_is(*texts)
        if is_next:
            self._place += 1
        return is_next

    def _parenthesised(self) -> list[Node] | None:
        """Moves past the parentheses that come next and returns what stands in them; None if none come or none close."""
        if not self._next_is("("):
            return None
        depth = 0
        for place in range(self._place, len(self._nodes)):
            depth += is_sign(self._nodes[place], "(") - is_sign(self._nodes[place], ")")
            if depth == 0:
                inner = list(self._nodes[self._place + 1 : place])
                self._place = place + 1
                return inner
        return None


def depth_change(node: Node) -> int:
    """Returns 1 for an opening bracket, -1 for a closing one, else 0."""
    if is_sign(node, *OPENING_BRACKETS):
        return 1
    return -1 if is_sign(node, *CLOSING_BRACKETS) else 0


def split_outside_brackets(nodes: Sequence[Node], is_separator: Callable[[Node], bool]) -> list[list[Node]]:
    """Splits nodes at the separators outside of brackets."""
    parts: list[list[Node]] = [[]]
    depth = 0
    for node in nodes:
        depth += depth_change(node)
        if depth == 0 and is_separator(node):
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def closes_last(nodes: Sequence[Node]) -> bool:
    """Returns whether the first bracket is closed by the last one."""
    depth = 0
    for node in nodes[:-1]:
        depth += depth_change(node)
        if depth <= 0:
            return False
    return True
