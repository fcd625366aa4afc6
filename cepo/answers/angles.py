r"""Writes every degree sign as one command, and angles of trigonometric functions in radians."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.exact_numbers import TRIGONOMETRIC_FUNCTIONS
from cepo.answers.lexer import Group, Node, Token, is_letters, is_sign, with_space
from cepo.answers.typesetting import DEGREE


def with_degrees(nodes: list[Node]) -> list[Node]:
    r"""Writes every degree sign as one command, and what stands in `\ang{}` and `\SI{}{}` as a value with its unit."""
    result: list[Node] = []
    remaining = list(nodes)
    while remaining:
        node = remaining.pop(0)
        if is_sign(node, "^") and remaining and _is_degree(remaining[0]):
            raised = remaining.pop(0)
            result.append(Token("command", DEGREE, node.spaced))
            if isinstance(raised, Group):
                result += raised.body[1:]  # the letter of `^{\circ C}`
        elif is_sign(node, r"\circ") and not _is_composition(result, remaining):
            result.append(Token("command", DEGREE, node.spaced))
        elif is_sign(node, r"\ang") and remaining and isinstance(remaining[0], Group):
            result += [remaining.pop(0), Token("command", DEGREE)]
        elif is_sign(node, r"\SI", r"\qty") and len(remaining) > 1 and isinstance(remaining[1], Group):
            value = remaining.pop(0)
            result += [value, *_upright(remaining[0])]
            remaining.pop(0)
        else:
            result.append(node)
    return result


def _upright(unit: Node) -> list[Node]:
    """Returns the tokens in a group as upright ones behind spaces, as a unit is written."""
    body = unit.body if isinstance(unit, Group) else ()
    return [Token(node.kind, node.text, spaced=True, upright=True) for node in body if isinstance(node, Token)]


def _is_composition(before: Sequence[Node], behind: Sequence[Node]) -> bool:
    r"""Returns whether a `\circ` between these nodes joins two functions: `f\circ g`."""
    return bool(before) and is_letters(before[-1]) and bool(behind)


def with_angles(nodes: list[Node]) -> list[Node]:
    r"""Writes degrees in the argument of a trigonometric function in radians: `\sin\frac{30\cdot\pi}{180}`."""
    result: list[Node] = []
    place = 0
    while place < len(nodes):
        node = nodes[place]
        result.append(node)
        place += 1
        if is_sign(node, *TRIGONOMETRIC_FUNCTIONS):
            end = _end_of_argument(nodes, place)
            result.extend(_in_radians(nodes[place:end]))
            place = end
    return result


def _end_of_argument(nodes: Sequence[Node], start: int) -> int:
    """Returns the place behind the argument of the function before `start`: parentheses, or factors up to a degree sign."""
    has_exponent = start + 1 < len(nodes) and is_sign(nodes[start], "^")
    place = start + 2 if has_exponent else start
    if place < len(nodes) and is_sign(nodes[place], "("):
        place = _end_of_parentheses(nodes, place)
        is_in_degrees = place < len(nodes) and is_sign(nodes[place], DEGREE)
        return place + 1 if is_in_degrees else place
    while place < len(nodes) and _is_factor(nodes[place]):
        place += 1
        if is_sign(nodes[place - 1], DEGREE):
            break
    return place


def _end_of_parentheses(nodes: Sequence[Node], start: int) -> int:
    """Returns the place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(nodes)):
        depth += is_sign(nodes[place], "(") - is_sign(nodes[place], ")")
        if depth == 0:
            return place + 1
    return len(nodes)


def _is_factor(node: Node) -> bool:
    if isinstance(node, Group) or node.kind in ("number", "letters"):
        return True
    return is_sign(node, r"\pi", r"\frac", DEGREE)


def _in_radians(nodes: Sequence[Node]) -> list[Node]:
    """Returns nodes in which every value before a degree sign is times π/180."""
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_in_radians(node.body)), node.spaced))
        elif is_sign(node, DEGREE) and result:
            angle = _take_last_factor(result)
            numerator = Group((*angle, Token("command", r"\cdot"), Token("command", r"\pi")))
            denominator = Group((Token("number", "180"),))
            result += [Token("command", r"\frac"), numerator, denominator]
        else:
            result.append(node)
    return result


def _take_last_factor(nodes: list[Node]) -> list[Node]:
    """Removes and returns the last factor: what stands in parentheses, or one node, or a fraction."""
    start = len(nodes) - 1
    if is_sign(nodes[-1], ")"):
        depth = 0
        for start in range(len(nodes) - 1, -1, -1):
            depth += is_sign(nodes[start], ")") - is_sign(nodes[start], "(")
            if depth == 0:
                break
    elif len(nodes) > 2 and is_sign(nodes[-3], r"\frac"):
        start = len(nodes) - 3
    factor = nodes[start:]
    del nodes[start:]
    return [with_space(node, False) for node in factor]


def _is_degree(node: Node) -> bool:
    r"""Returns whether a node is the raised `\circ`, `{\circ}`, `{\circ C}`, `o` or `{o}`."""
    if isinstance(node, Group):
        if not node.body:
            return False
        is_only_node = len(node.body) == 1
        return is_sign(node.body[0], r"\circ", DEGREE) or (is_only_node and _is_degree(node.body[0]))
    return is_sign(node, r"\circ", DEGREE) or (node.kind == "letters" and node.text == "o")
