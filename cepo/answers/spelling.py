r"""Gives the parts of an answer one spelling: fractions, roots, matrices, degrees, words and exponents.

A text becomes a tree of nodes (`cepo.answers.lexer`), `typesetting`, `digits` and the steps of this module simplify the
tree, and `writing` turns it into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepo.answers.angles import with_angles, with_degrees
from cepo.answers.digits import merged_thousands, with_numbers
from cepo.answers.environments import with_environments
from cepo.answers.fractions_and_roots import take_radicand, with_fractions
from cepo.answers.lexer import (
    Group,
    Node,
    Token,
    is_letters,
    is_number,
    is_sign,
    is_word,
    plain_characters,
    read_nodes,
    text_of,
    with_space,
)
from cepo.answers.typesetting import without_typesetting

_PREFIXES = (r"\angle", r"\triangle", r"\parallel", r"\perp", r"\cong", r"\sim")
"""Commands without an argument, so that braces behind them mean nothing: `\\angle{ABC}`."""


def nodes_of(text: str, commas: bool = True) -> list[Node]:
    """Returns the simplified nodes of a text; `commas`: whether `1,234` is a number and not a list of two."""
    nodes = without_typesetting(read_nodes(plain_characters(text)))
    nodes = merged_thousands(nodes, commas)
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


_MULTIPLES = {
    "dozen": "12", "hundred": "100", "thousand": "1000", "lakh": "100000", "million": "1000000", "crore": "10000000",
    "billion": "1000000000", "trillion": "1000000000000",
}  # fmt: skip
_PERCENT = ("percent", "percents", "pct")


def _with_words(nodes: list[Node]) -> list[Node]:
    """Writes the words `pi`, `infinity`, `percent`, `million` and the `to` of a ratio as mathematics."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        if not isinstance(node, Token) or node.kind != "letters":
            result.append(node)
            continue
        word = node.text.lower()
        behind = nodes[position + 1 :]
        if node.text in ("pi", "Pi", "PI"):
            result.append(Token("command", r"\pi", node.spaced))
        elif word == "infinity":
            result.append(Token("command", r"\infty", node.spaced))
        elif not result:
            result.append(node)
        elif word == "x" and is_number(result[-1]) and _begins_power_of_ten(behind):
            result.append(Token("command", r"\times"))
        elif word in _PERCENT:
            result.append(Token("sign", "%"))
        elif word == "cent" and is_word(result[-1], "per"):
            result[-1] = Token("sign", "%")
        elif word in _MULTIPLES and _is_number_or_group(result[-1]):
            result += [Token("command", r"\cdot"), Token("number", _MULTIPLES[word])]
        elif word == "to" and behind and _is_value(result[-1]) and _is_value(behind[0]):
            result.append(Token("sign", ":"))
        else:
            result.append(node)
    return result


def _with_natural_logarithms(nodes: list[Node]) -> list[Node]:
    r"""Writes `\log_e` as `\ln`. As in LaTeX the index is one character, so that `\log_ex` is `\ln x`."""
    result: list[Node] = []
    remaining = list(nodes)
    while remaining:
        node = remaining.pop(0)
        if not is_sign(node, r"\log") or len(remaining) < 2 or not is_sign(remaining[0], "_"):
            result.append(node)
            continue
        index = remaining[1]
        is_in_braces = isinstance(index, Group)
        letters = index.body[0] if is_in_braces and len(index.body) == 1 else index
        if text_of(letters) == "e":
            result.append(Token("command", r"\ln", node.spaced))
            del remaining[:2]
        elif is_letters(letters) and text_of(letters).startswith("e") and not is_in_braces:
            result.append(Token("command", r"\ln", node.spaced))
            remaining[:2] = [Token("letters", text_of(letters)[1:])]
        else:
            result.append(node)
    return result


def _begins_power_of_ten(nodes: Sequence[Node]) -> bool:
    """Returns whether nodes begin with `10^`, so that the x of `1.6 x 10^3` before them is a sign."""
    return len(nodes) > 1 and text_of(nodes[0]) == "10" and is_sign(nodes[1], "^")


def _is_number_or_group(node: Node) -> bool:
    return isinstance(node, Group) or is_number(node)


def _is_value(node: Node) -> bool:
    return _is_number_or_group(node) or is_sign(node, r"\sqrt", r"\pi", r"\frac")


def _with_exponents(nodes: list[Node]) -> list[Node]:
    """Writes `**` as `^`, and puts exponents of more than one character in braces: `x^{10}`, `x^2`."""
    result: list[Node] = []
    remaining = list(nodes)
    while remaining:
        node = remaining.pop(0)
        is_power_sign = (
            is_sign(node, "*") and bool(remaining) and is_sign(remaining[0], "*") and not remaining[0].spaced
        )
        if is_power_sign and result:
            remaining.pop(0)
            node = Token("sign", "^")
        result.append(node)
        if is_sign(node, "^") and remaining and not is_sign(remaining[0], "{", "}", "^"):
            result.append(_as_exponent(_take_exponent(remaining)))
    return result


def _take_exponent(remaining: list[Node]) -> list[Node]:
    """Removes and returns the exponent behind `^`: what stands in parentheses or braces, a signed number, or one node."""
    if is_sign(remaining[0], "("):
        argument: list[Node] = []
        take_radicand(remaining, argument)
        group = argument[0] if argument else None
        return list(group.body) if isinstance(group, Group) else argument
    if is_sign(remaining[0], "-", "+") and len(remaining) > 1 and is_number(remaining[1]):
        return [remaining.pop(0), remaining.pop(0)]
    node = remaining.pop(0)
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
    for position, node in enumerate(nodes):
        previous = nodes[position - 1] if position else None
        following = nodes[position + 1] if position + 1 < len(nodes) else None
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
    return node.kind == "command" and node.text not in _PREFIXES


_STEPS: tuple[Callable[[list[Node]], list[Node]], ...] = (
    with_fractions, with_environments, with_degrees, with_angles, with_numbers, _with_natural_logarithms, _with_words,
    _with_exponents, _without_braces,
)  # fmt: skip
