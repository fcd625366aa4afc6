r"""Writes every degree sign as one command, and angles of trigonometric functions in radians."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.rewards.tokens import Group, Node, Token, is_sign, with_space
from cepo.rewards.typesetting import DEGREE


def with_degrees(nodes: list[Node]) -> list[Node]:
    r"""Writes every degree sign as one command, and what stands in `\ang{}` and `\SI{}{}` as a value with its unit."""
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        node = nodes[position]
        following = nodes[position + 1 : position + 3]
        if is_sign(node, "^") and following and _is_degree(following[0]):
            inside = list(following[0].body)[1:] if isinstance(following[0], Group) else []
            result.append(Token("command", DEGREE, node.spaced))
            result.extend(inside)
            position += 2
        elif is_sign(node, r"\circ") and not _is_composition(result, following):
            result.append(Token("command", DEGREE, node.spaced))
            position += 1
        elif is_sign(node, r"\ang") and following and isinstance(following[0], Group):
            result.extend([following[0], Token("command", DEGREE)])
            position += 2
        elif is_sign(node, r"\SI", r"\qty") and len(following) == 2 and isinstance(following[1], Group):
            unit = [Token(part.kind, part.text, True, True) for part in following[1].body if isinstance(part, Token)]
            result.extend([following[0], *unit])
            position += 3
        else:
            result.append(node)
            position += 1
    return result


def _is_composition(before: Sequence[Node], behind: Sequence[Node]) -> bool:
    r"""Returns whether a `\circ` between these nodes joins two functions: `f\circ g`."""
    previous = before[-1] if before else None
    return isinstance(previous, Token) and previous.kind == "letters" and bool(behind)


_TRIGONOMETRIC = (r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc")


def with_angles(nodes: list[Node]) -> list[Node]:
    r"""Writes degrees in the argument of a trigonometric function in radians: `\sin\frac{30\cdot\pi}{180}`."""
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        result.append(nodes[position])
        position += 1
        if is_sign(result[-1], *_TRIGONOMETRIC):
            end = _end_of_argument(nodes, position)
            result.extend(_in_radians(nodes[position:end]))
            position = end
    return result


def _end_of_argument(nodes: Sequence[Node], start: int) -> int:
    """Returns the place behind the argument of the function before `start`: parentheses, or factors up to a degree sign."""
    place = start
    if place + 1 < len(nodes) and is_sign(nodes[place], "^"):
        place += 2
    if place < len(nodes) and is_sign(nodes[place], "("):
        depth = 0
        while place < len(nodes):
            depth += is_sign(nodes[place], "(") - is_sign(nodes[place], ")")
            place += 1
            if depth == 0:
                break
        is_degree = place < len(nodes) and is_sign(nodes[place], DEGREE)
        return place + 1 if is_degree else place
    while place < len(nodes):
        node = nodes[place]
        is_factor = (
            isinstance(node, Group) or node.kind in ("number", "letters") or is_sign(node, r"\pi", r"\frac", DEGREE)
        )
        if not is_factor:
            break
        place += 1
        if is_sign(node, DEGREE):
            break
    return place


def _in_radians(nodes: Sequence[Node]) -> list[Node]:
    """Returns nodes in which every value before a degree sign is times π/180."""
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_in_radians(node.body)), node.spaced))
        elif is_sign(node, DEGREE) and result:
            angle = _last_factor(result)
            numerator = Group((*angle, Token("command", r"\cdot"), Token("command", r"\pi")))
            result.extend([Token("command", r"\frac"), numerator, Group((Token("number", "180"),))])
        else:
            result.append(node)
    return result


def _last_factor(nodes: list[Node]) -> list[Node]:
    """Removes and returns the last factor: what stands in parentheses, or one node, or a fraction."""
    length = 1
    if is_sign(nodes[-1], ")"):
        depth = 0
        for length in range(1, len(nodes) + 1):
            depth += is_sign(nodes[-length], ")") - is_sign(nodes[-length], "(")
            if depth == 0:
                break
    elif len(nodes) > 2 and is_sign(nodes[-3], r"\frac"):
        length = 3
    factor = nodes[-length:]
    del nodes[-length:]
    return [with_space(part, False) for part in factor]


def _is_degree(node: Node) -> bool:
    r"""Returns whether a node is the raised `\circ`, `{\circ}`, `{\circ C}`, `o` or `{o}`."""
    if isinstance(node, Group):
        return bool(node.body) and (
            is_sign(node.body[0], r"\circ", DEGREE) or (len(node.body) == 1 and _is_degree(node.body[0]))
        )
    return is_sign(node, r"\circ", DEGREE) or (node.kind == "letters" and node.text == "o")
