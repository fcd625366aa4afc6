r"""Gives the parts of an answer one spelling: fractions, roots, matrices, degrees, words and exponents.

A text becomes a tree of nodes (`cepo.rewards.tokens`), `typesetting`, `digits` and the steps of this module simplify the
tree, and `writing` turns it into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepo.rewards.angles import with_angles, with_degrees
from cepo.rewards.digits import merged_thousands, with_numbers
from cepo.rewards.environments import with_environments
from cepo.rewards.tokens import (
    Group,
    Node,
    Token,
    is_number,
    is_sign,
    plain_characters,
    read_nodes,
    text_of,
    with_space,
)
from cepo.rewards.typesetting import without_typesetting

_FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac", r"\nicefrac", r"\sfrac", r"\flatfrac", r"\xfrac")
_ACCENTS = (r"\vec", r"\overrightarrow", r"\hat", r"\tilde", r"\overline", r"\bar")
_PREFIXES = (r"\angle", r"\triangle", r"\parallel", r"\perp", r"\cong", r"\sim")
"""Commands without an argument, so that braces behind them mean nothing: `\\angle{ABC}`."""
_BINOMIALS = (r"\binom", r"\dbinom", r"\tbinom")
_WITH_TWO_PARTS: dict[str, str] = {**dict.fromkeys(_FRACTIONS, r"\frac"), **dict.fromkeys(_BINOMIALS, r"\binom")}
_SYSTEMS = ("aligned", "align", "align*", "gathered", "gather", "gather*", "split")
"""Environments of several lines, which are read like `cases`, without their marks of alignment."""
_CASES = Group((Token("letters", "cases"),))


def nodes_of(text: str, commas: bool = True) -> list[Node]:
    """Returns the simplified nodes of a text; `commas`: whether `1,234` is a number and not a list of two."""
    nodes = without_typesetting(read_nodes(plain_characters(text)))
    nodes = merged_thousands(nodes, commas)
    for step in _STEPS:
        nodes = _in_groups(step)(nodes)
    return nodes


def _in_groups(step: Callable[[list[Node]], list[Node]]) -> Callable[[list[Node]], list[Node]]:
    """Makes a step that changes a list of nodes change the lists within its groups first."""

    def everywhere(nodes: list[Node]) -> list[Node]:
        changed: list[Node] = []
        for node in nodes:
            if isinstance(node, Group):
                changed.append(Group(tuple(everywhere(list(node.body))), node.spaced))
            else:
                changed.append(node)
        return step(changed)

    return everywhere


def _with_fractions(nodes: list[Node]) -> list[Node]:
    r"""Writes every fraction as `\frac{a}{b}` and every root as `\sqrt{a}` or `\sqrt[n]{a}`."""
    for position, node in enumerate(nodes):
        if is_sign(node, r"\over", r"\choose"):
            command = r"\frac" if is_sign(node, r"\over") else r"\binom"
            parts = (_with_fractions(nodes[:position]), _with_fractions(nodes[position + 1 :]))
            return [Token("command", command, nodes[0].spaced), *(Group(tuple(part)) for part in parts)]
    result: list[Node] = []
    rest = list(nodes)
    while rest:
        node = rest.pop(0)
        command = _WITH_TWO_PARTS.get(text_of(node))
        if command is not None:
            arguments: list[Node] = []
            _take_argument(rest, arguments)
            _take_argument(rest, arguments)
            result.extend([Token("command", command, node.spaced), *arguments])
        elif is_sign(node, *_ACCENTS) and rest and isinstance(rest[0], Token) and rest[0].kind == "letters":
            result.append(node)
            _take_argument(rest, result)
        elif is_sign(node, r"\root") and len(rest) > 2 and is_sign(rest[1], r"\of"):
            result.extend([Token("command", r"\sqrt", node.spaced), Token("sign", "["), rest[0], Token("sign", "]")])
            del rest[:2]
            _take_radicand(rest, result)
        elif is_sign(node, r"\abs") and rest and isinstance(rest[0], Group):
            inside = rest.pop(0)
            assert isinstance(inside, Group)
            result.extend([Token("sign", "|"), *inside.body, Token("sign", "|")])
        elif is_sign(node, r"\sqrt", r"\surd") or _is_root_in_words(node, rest):
            result.append(Token("command", r"\sqrt", node.spaced))
            _take_index(rest, result)
            _take_radicand(rest, result)
        else:
            result.append(node)
    return result


def _is_root_in_words(node: Node, rest: Sequence[Node]) -> bool:
    """Returns whether a node is the word of `sqrt(3)` or `sqrt3`."""
    return _is_word(node, "sqrt") and bool(rest) and (is_sign(rest[0], "(") or is_number(rest[0]))


def _is_word(node: Node, *words: str) -> bool:
    return isinstance(node, Token) and node.kind == "letters" and node.text.lower() in words


def _take_argument(rest: list[Node], result: list[Node]) -> None:
    r"""Moves the argument that a command finds next: a group, one digit (`\frac12`), or one token."""
    if not rest or is_sign(rest[0], "{", "}", "["):
        return  # a brace without partner is no argument
    node = rest.pop(0)
    if isinstance(node, Group):
        result.append(with_space(node, False))
        return
    is_long = node.kind in ("number", "letters") and len(node.text) > 1
    if is_long and node.text.replace(".", "").isalnum() and "." not in node.text:
        rest.insert(0, Token(node.kind, node.text[1:], False, node.upright))
        node = Token(node.kind, node.text[0], False, node.upright)
    result.append(Group((with_space(node, False),)))


def _take_index(rest: list[Node], result: list[Node]) -> None:
    if not rest or not is_sign(rest[0], "["):
        return
    for length, node in enumerate(rest):
        if is_sign(node, "]"):
            result.extend(with_space(inner, False) for inner in rest[: length + 1])
            del rest[: length + 1]
            return


def _take_radicand(rest: list[Node], result: list[Node]) -> None:
    r"""Moves what stands under a root: a group, the parentheses of `sqrt(...)`, a number after a space, or one token."""
    if rest and is_sign(rest[0], "("):
        depth = 0
        for length, node in enumerate(rest):
            depth += is_sign(node, "(") - is_sign(node, ")")
            if depth == 0:
                result.append(Group(tuple(rest[1:length])))
                del rest[: length + 1]
                return
    if rest and is_number(rest[0]) and rest[0].spaced:
        result.append(Group((with_space(rest.pop(0), False),)))
        return
    _take_argument(rest, result)


def _is_letters(node: Node) -> bool:
    return isinstance(node, Token) and node.kind == "letters"


_MULTIPLES = {
    "dozen": "12", "hundred": "100", "thousand": "1000", "lakh": "100000", "million": "1000000", "crore": "10000000",
    "billion": "1000000000", "trillion": "1000000000000",
}  # fmt: skip
_PERCENT = ("percent", "percents", "pct")


def _with_words(nodes: list[Node]) -> list[Node]:
    """Writes the words `pi`, `infinity`, `percent`, `million` and the `to` of a ratio as mathematics."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = result[-1] if result else None
        following = nodes[position + 1] if position + 1 < len(nodes) else None
        if not isinstance(node, Token) or node.kind != "letters":
            result.append(node)
            continue
        word = node.text.lower()
        if word == "x" and _is_power_of_ten(nodes, position) and previous is not None and is_number(previous):
            result.append(Token("command", r"\times"))
        elif node.text in ("pi", "Pi", "PI"):
            result.append(Token("command", r"\pi", node.spaced))
        elif word == "infinity":
            result.append(Token("command", r"\infty", node.spaced))
        elif previous is not None and (word in _PERCENT or (word == "cent" and _is_word(previous, "per"))):
            if word == "cent":
                result.pop()
            result.append(Token("sign", "%"))
        elif previous is not None and word in _MULTIPLES and (is_number(previous) or isinstance(previous, Group)):
            result.extend([Token("command", r"\cdot"), Token("number", _MULTIPLES[word])])
        elif word == "to" and previous is not None and following is not None and _are_values(previous, following):
            result.append(Token("sign", ":"))
        else:
            result.append(node)
    return result


def _is_power_of_ten(nodes: list[Node], position: int) -> bool:
    """Returns whether `10^` comes after the node at `position`, so that the x of `1.6 x 10^3` is a sign."""
    behind = nodes[position + 1 : position + 3]
    return len(behind) == 2 and text_of(behind[0]) == "10" and is_sign(behind[1], "^")


def _are_values(first: Node, second: Node) -> bool:
    return all(
        isinstance(node, Group) or is_number(node) or is_sign(node, r"\sqrt", r"\pi", r"\frac")
        for node in (first, second)
    )


def _with_exponents(nodes: list[Node]) -> list[Node]:
    """Writes `**` as `^`, and puts exponents of more than one character in braces: `x^{10}`, `x^2`."""
    result: list[Node] = []
    rest = list(nodes)
    while rest:
        node = rest.pop(0)
        if is_sign(node, "*") and rest and is_sign(rest[0], "*") and result and not rest[0].spaced:
            rest.pop(0)
            node = Token("sign", "^")
        result.append(node)
        if not is_sign(node, "^") or not rest or is_sign(rest[0], "{", "}", "^"):
            continue
        exponent: list[Node] = []
        if is_sign(rest[0], "("):
            _take_radicand(rest, exponent)
            only_group = exponent[0] if exponent else None
            exponent = list(only_group.body) if isinstance(only_group, Group) else exponent
        elif is_sign(rest[0], "-", "+") and len(rest) > 1 and is_number(rest[1]):
            exponent = [rest.pop(0), rest.pop(0)]
        else:
            argument = rest.pop(0)
            exponent = list(argument.body) if isinstance(argument, Group) else [argument]
        exponent = [with_space(part, part.spaced and place > 0) for place, part in enumerate(exponent)]
        only = exponent[0] if len(exponent) == 1 else None
        is_short = isinstance(only, Token) and (len(only.text) == 1 or only.kind in ("sign", "command"))
        result.append(exponent[0] if is_short else Group(tuple(exponent)))
    return result


def _without_braces(nodes: list[Node]) -> list[Node]:
    """Drops braces that hold nothing or one token, unless they hold the argument of a command."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = nodes[position - 1] if position else None
        following = nodes[position + 1] if position + 1 < len(nodes) else None
        is_argument = previous is not None and (isinstance(previous, Group) or is_sign(previous, "^", "_", "]"))
        if isinstance(previous, Token) and previous.kind == "command":
            is_argument = is_argument or previous.text not in _PREFIXES
        if not isinstance(node, Group) or is_argument or isinstance(following, Group):
            result.append(node)
        elif len(node.body) == 1 and isinstance(node.body[0], Token):
            result.append(with_space(node.body[0], node.spaced or _is_letters(node.body[0])))
        elif node.body:
            result.append(node)
    return result


_STEPS: tuple[Callable[[list[Node]], list[Node]], ...] = (
    _with_fractions, with_environments, with_degrees, with_angles, with_numbers, _with_words, _with_exponents, _without_braces,
)  # fmt: skip
