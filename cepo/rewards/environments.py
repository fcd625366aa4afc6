r"""Gives matrices and systems of equations one spelling: `\begin{pmatrix}`, `\begin{vmatrix}` or `\begin{cases}`."""

from __future__ import annotations

from cepo.rewards.tokens import Group, Node, Token, is_sign
from cepo.rewards.writing import written

_MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array", "Bmatrix")
_OLD_MATRICES = (r"\matrix", r"\pmatrix", r"\bmatrix")
"""Commands of plain TeX, with the rows as their argument."""
_SYSTEMS = ("aligned", "align", "align*", "gathered", "gather", "gather*", "split")
"""Environments of several lines, which are read like `cases`, without their marks of alignment."""
_MATRIX = Group((Token("letters", "pmatrix"),))
_DETERMINANT = Group((Token("letters", "vmatrix"),))
_CASES = Group((Token("letters", "cases"),))
_BEGIN = Token("command", r"\begin")
_END = Token("command", r"\end")


def with_environments(nodes: list[Node]) -> list[Node]:
    r"""Writes every matrix as `\begin{pmatrix}...\end{pmatrix}`, whichever brackets it has, and lines as `cases`."""
    return _without_brackets(_renamed(nodes))


def _renamed(nodes: list[Node]) -> list[Node]:
    """Gives the environments of one kind one name."""
    result: list[Node] = []
    is_system = False
    for node in nodes:
        previous = result[-1] if result else None
        is_name = isinstance(node, Group) and previous is not None and is_sign(previous, r"\begin", r"\end")
        if is_name:
            name = written(node.body)  # type: ignore[union-attr]
            is_system = name in _SYSTEMS and is_sign(previous, r"\begin")  # type: ignore[arg-type]
            if name in _MATRICES:
                result.append(_MATRIX)
            elif name in _SYSTEMS:
                result.append(_CASES)
            else:
                result.append(node)
        elif isinstance(node, Group) and len(result) > 1 and is_sign(result[-2], r"\begin"):
            continue  # the columns of an array
        elif not (is_system and is_sign(node, "&")):
            result.append(node)
    return result


def _without_brackets(nodes: list[Node]) -> list[Node]:
    r"""Names a matrix by the brackets around it, and drops them; writes `\pmatrix{...}` as an environment."""
    if not nodes:
        return nodes
    is_in_brackets = is_sign(nodes[0], "[", "(") and is_sign(nodes[-1], "]", ")")
    inner = nodes[1:-1] if is_in_brackets else nodes
    if len(inner) == 2 and is_sign(inner[0], *_OLD_MATRICES) and isinstance(inner[1], Group):
        return [_BEGIN, _MATRIX, *inner[1].body, _END, _MATRIX]
    starts = [place for place, node in enumerate(nodes) if is_sign(node, r"\begin")]
    if starts != [1] or len(nodes) < 5:
        return nodes
    if is_sign(nodes[0], r"\{") and is_sign(nodes[-2], r"\end"):  # `\left\{\begin{array}{l}...\end{array}\right.`
        return [_BEGIN, _CASES, *nodes[3:-2], _END, _CASES]
    if not is_sign(nodes[-3], r"\end"):
        return nodes
    if is_in_brackets:
        return inner
    if is_sign(nodes[0], "|") and is_sign(nodes[-1], "|"):
        return [_BEGIN, _DETERMINANT, *nodes[3:-3], _END, _DETERMINANT]
    return nodes
