r"""One spelling for fractions, roots, degrees, words and exponents.

A text becomes a tree of nodes (`cepo.answers.lexer`); `typesetting`, `digits` and the steps of this module simplify it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepo.answers.characters import plain_characters
from cepo.answers.digits import with_plain_numbers
from cepo.answers.lexer import (
    Group,
    Node,
    NodeCursor,
    Token,
    is_letters,
    is_number,
    is_sign,
    read_nodes,
    text_of,
    with_space,
    word_of,
)
from cepo.answers.number_words import with_digits
from cepo.answers.numbers import ANGLE_FUNCTIONS
from cepo.answers.tables import UNITS
from cepo.answers.typesetting import DEGREE, without_typesetting

_WITH_TWO_ARGUMENTS = (r"\frac", r"\binom")
_WITHOUT_ARGUMENT = (r"\angle", r"\triangle", r"\parallel", r"\perp", r"\cong", r"\sim")
"""Commands without an argument, so that braces behind them mean nothing: `\\angle{ABC}`."""


def nodes_of(text: str, commas: bool = True) -> list[Node]:
    """Returns the simplified nodes of a text; `commas`: whether `1,234` is a number and not a list of two."""
    nodes = without_typesetting(read_nodes(with_plain_numbers(plain_characters(text), commas)))
    for step in _STEPS:
        nodes = _in_groups(step, nodes)
    return nodes


def _in_groups(step: Callable[[list[Node]], list[Node]], nodes: Sequence[Node]) -> list[Node]:
    """Applies a step, which changes a list of nodes, to the lists within groups and then to the list itself."""
    changed: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            changed.append(Group(tuple(_in_groups(step, node.body)), node.spaced))
        else:
            changed.append(node)
    return step(changed)


def _with_fractions(nodes: list[Node]) -> list[Node]:
    r"""Writes every fraction as `\frac{a}{b}` and every root as `\sqrt{a}` or `\sqrt[n]{a}`."""
    return _FractionsAndRoots(nodes).whole()


class _FractionsAndRoots(NodeCursor):
    """Gives commands their arguments in braces."""

    def whole(self) -> list[Node]:
        result: list[Node] = []
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            self._place += 1
            if text_of(node) in _WITH_TWO_ARGUMENTS:
                result.append(node)
                result += self._argument()
                result += self._argument()
            elif is_sign(node, r"\sqrt") or self._is_root_in_words(node):
                result.append(Token("command", r"\sqrt", node.spaced))
                result += self._index()
                result += self._radicand()
            else:
                result.append(node)
        return result

    def _is_root_in_words(self, node: Node) -> bool:
        """Returns whether a node is the word of `sqrt(3)` or `sqrt3`."""
        following = self._peek()
        if word_of(node) != "sqrt" or following is None:
            return False
        return is_sign(following, "(") or is_number(following)

    def _argument(self) -> list[Node]:
        r"""Takes the argument that a command finds next: a group, one character (`\frac12`), or one token."""
        node = self._peek()
        if node is None or is_sign(node, "{", "}", "["):
            return []  # a brace without partner is no argument
        self._place += 1
        if isinstance(node, Group):
            return [with_space(node, False)]
        text = node.text
        if node.kind in ("number", "letters") and len(text) > 1 and text.isalnum():
            first_character = Token(node.kind, text[0], upright=node.upright)
            other_characters = Token(node.kind, text[1:], upright=node.upright)
            self._nodes = [*self._nodes[: self._place], other_characters, *self._nodes[self._place :]]
            return [Group((first_character,))]
        return [Group((with_space(node, False),))]

    def _index(self) -> list[Node]:
        """Takes the index of a root with its brackets, if one comes next."""
        if not self._next_is("["):
            return []
        for place in range(self._place, len(self._nodes)):
            if is_sign(self._nodes[place], "]"):
                index = [with_space(node, False) for node in self._nodes[self._place : place + 1]]
                self._place = place + 1
                return index
        return []

    def _radicand(self) -> list[Node]:
        r"""Takes what stands under a root: a group, the parentheses of `sqrt(...)`, a number after a space, or one token."""
        inner = self._parenthesised()
        if inner is not None:
            return [Group(tuple(inner))]
        node = self._peek()
        if node is not None and is_number(node) and node.spaced:
            self._place += 1
            return [Group((with_space(node, False),))]
        return self._argument()


def _with_degrees(nodes: list[Node]) -> list[Node]:
    """Writes every degree sign as one command."""
    result: list[Node] = []
    place = 0
    while place < len(nodes):
        node = nodes[place]
        place += 1
        if is_sign(node, "^") and place < len(nodes) and _is_degree(nodes[place]):
            raised = nodes[place]
            place += 1
            result.append(Token("command", DEGREE, node.spaced))
            if isinstance(raised, Group):
                result += raised.body[1:]  # the letter of `^{\circ C}`
        elif is_sign(node, r"\circ"):
            result.append(Token("command", DEGREE, node.spaced))
        else:
            result.append(node)
    return result


def _is_degree(node: Node) -> bool:
    r"""Returns whether a node is the raised `\circ`, `{\circ}`, `{\circ C}`, `o` or `{o}`."""
    if isinstance(node, Group):
        if not node.body:
            return False
        is_only_node = len(node.body) == 1
        return is_sign(node.body[0], r"\circ", DEGREE) or (is_only_node and _is_degree(node.body[0]))
    return is_sign(node, r"\circ", DEGREE) or (node.kind == "letters" and node.text == "o")


_ENDS_OF_ARGUMENTS = ("=", r"\approx", ",", ";")


def _with_radians(nodes: list[Node]) -> list[Node]:
    r"""Writes the degrees behind a trigonometric function in radians: `\sin{\frac{30\pi}{180}}`."""
    result: list[Node] = []
    is_in_argument = False
    for node in nodes:
        if is_sign(node, *ANGLE_FUNCTIONS):
            is_in_argument = True
        elif is_sign(node, *_ENDS_OF_ARGUMENTS):
            is_in_argument = False
        if is_in_argument:
            _add_in_radians(result, node)
        else:
            result.append(node)
    return result


def _add_in_radians(result: list[Node], node: Node) -> None:
    """Adds a node to those before it; a degree sign becomes a factor of π/180 of the value before it."""
    if isinstance(node, Group):
        body: list[Node] = []
        for inner in node.body:
            _add_in_radians(body, inner)
        result.append(Group(tuple(body), node.spaced))
    elif is_sign(node, DEGREE) and result:
        numerator = Group((with_space(result.pop(), False), Token("command", r"\pi")))
        denominator = Group((Token("number", "180"),))
        result.append(Group((Token("command", r"\frac"), numerator, denominator)))
    else:
        result.append(node)


_MULTIPLES: dict[str, str] = UNITS["multiples"]
_PERCENT = ("percent", "percents", "percentage", "pct")
_APPROXIMATELY = ("about", "approximately")


def _with_words(nodes: list[Node]) -> list[Node]:
    """Writes the words `pi`, `percent`, `million` and the `to` of a ratio as mathematics."""
    result: list[Node] = []
    nodes = with_digits(nodes)
    for place, node in enumerate(nodes):
        behind = nodes[place + 1] if place + 1 < len(nodes) else None
        if isinstance(node, Token) and node.kind == "letters":
            _add_word(result, node, behind)
        else:
            result.append(node)
    return result


def _add_word(result: list[Node], node: Token, behind: Node | None) -> None:
    """Adds a word, or what it stands for, to the nodes before it; `behind` is the node behind the word."""
    word = node.text.lower()
    previous = result[-1] if result else None
    if word == "pi":
        result.append(Token("command", r"\pi", node.spaced))
    elif previous is None:
        is_before_a_value = behind is not None and not is_letters(behind)
        is_approximate = word in _APPROXIMATELY and is_before_a_value
        result.append(Token("command", r"\approx") if is_approximate else node)
    elif word == "x" and is_number(previous) and behind is not None and text_of(behind) == "10":
        result.append(Token("command", r"\times"))
    elif word in _PERCENT:
        result.append(Token("sign", "%"))
    elif word in ("point", "points") and is_sign(previous, "%"):
        return  # `25 percentage points`
    elif word == "cent" and word_of(previous) == "per":
        result[-1] = Token("sign", "%")
    elif word in _MULTIPLES and _is_number_or_group(previous):
        result += [Token("command", r"\cdot"), Token("number", _MULTIPLES[word])]
    elif word in ("to", "比") and behind is not None and _is_value(previous) and _is_value(behind):
        result.append(Token("sign", ":"))
    else:
        result.append(node)


def _is_number_or_group(node: Node) -> bool:
    return isinstance(node, Group) or is_number(node)


def _is_value(node: Node) -> bool:
    return _is_number_or_group(node) or is_sign(node, r"\sqrt", r"\pi", r"\frac")


def _with_exponents(nodes: list[Node]) -> list[Node]:
    """Writes `**` as `^`, and puts exponents of more than one character in braces: `x^{10}`, `x^2`."""
    return _Exponents(nodes).whole()


class _Exponents(NodeCursor):
    """Gives powers one spelling."""

    def whole(self) -> list[Node]:
        result: list[Node] = []
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            self._place += 1
            if result and is_sign(node, "*") and self._skip("*"):
                node = Token("sign", "^")
            result.append(node)
            is_raised = is_sign(node, "^") and self._peek() is not None
            if is_raised and not self._next_is("{", "}", "^"):
                result.append(_as_exponent(self._exponent()))
        return result

    def _exponent(self) -> list[Node]:
        """Takes the exponent behind `^`: what stands in parentheses or braces, a signed number, or one node."""
        inner = self._parenthesised()
        if inner is not None:
            return inner
        node = self._nodes[self._place]
        self._place += 1
        following = self._peek()
        if is_sign(node, "-", "+") and following is not None and is_number(following):
            self._place += 1
            return [node, following]
        return list(node.body) if isinstance(node, Group) else [node]


def _as_exponent(nodes: Sequence[Node]) -> Node:
    """Returns nodes as one: a short token as it is, others as a group."""
    exponent = [with_space(node, node.spaced and place > 0) for place, node in enumerate(nodes)]
    only_node = exponent[0] if len(exponent) == 1 else None
    if isinstance(only_node, Token) and (len(only_node.text) == 1 or only_node.kind in ("sign", "command")):
        return only_node
    return Group(tuple(exponent))


def _without_braces(nodes: list[Node]) -> list[Node]:
    """Drops braces that hold nothing or one token, unless they hold the argument of a command."""
    result: list[Node] = []
    for place, node in enumerate(nodes):
        previous = nodes[place - 1] if place else None
        following = nodes[place + 1] if place + 1 < len(nodes) else None
        if not isinstance(node, Group) or _takes_argument(previous) or isinstance(following, Group):
            result.append(node)
            continue
        only_node = node.body[0] if len(node.body) == 1 else None
        if isinstance(only_node, Token):
            # Letters that stood in braces remain apart from those before them.
            result.append(with_space(only_node, node.spaced or is_letters(only_node)))
        elif node.body:
            result.append(node)
    return result


def _takes_argument(node: Node | None) -> bool:
    """Returns whether braces behind this node hold an argument; a group may be the first argument of two."""
    if node is None:
        return False
    if isinstance(node, Group) or is_sign(node, "^", "_", "]"):
        return True
    return node.kind == "command" and node.text not in _WITHOUT_ARGUMENT


_STEPS: tuple[Callable[[list[Node]], list[Node]], ...] = (
    _with_fractions, _with_degrees, _with_radians, _with_words, _with_exponents, _without_braces,
)  # fmt: skip
