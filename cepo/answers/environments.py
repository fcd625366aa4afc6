r"""Gives matrices and systems of equations one spelling: `\begin{pmatrix}`, `\begin{vmatrix}` or `\begin{cases}`."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.latex_symbols import written
from cepo.answers.lexer import Group, Node, Token, is_sign

_MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array", "Bmatrix")
_OLD_MATRICES = (r"\matrix", r"\pmatrix", r"\bmatrix")
"""Commands of plain TeX, with the rows as their argument."""
_SYSTEMS = ("aligned", "align", "align*", "gathered", "gather", "gather*", "split")
"""Environments of several lines, which are read like `cases`, without their marks of alignment."""
_MATRIX = Group((Token("letters", "pmatrix"),))
_DETERMINANT = Group((Token("letters", "vmatrix"),))
_CASES = Group((Token("letters", "cases"),))
_NAMES = {**dict.fromkeys(_MATRICES, _MATRIX), **dict.fromkeys(_SYSTEMS, _CASES)}
"""The name that the environments of a kind are given."""


def with_environments(nodes: list[Node]) -> list[Node]:
    r"""Writes every matrix as `\begin{pmatrix}...\end{pmatrix}`, whichever brackets it has, and lines as `cases`."""
    return _without_brackets(_renamed(nodes))


def _renamed(nodes: list[Node]) -> list[Node]:
    """Gives the environments of one kind one name."""
    result: list[Node] = []
    is_system = False
    for node in nodes:
        is_behind_begin = bool(result) and is_sign(result[-1], r"\begin")
        is_behind_end = bool(result) and is_sign(result[-1], r"\end")
        is_behind_name = len(result) > 1 and is_sign(result[-2], r"\begin")
        if isinstance(node, Group) and (is_behind_begin or is_behind_end):
            name = written(node.body)
            is_system = is_behind_begin and name in _SYSTEMS
            result.append(_NAMES.get(name, node))
        elif isinstance(node, Group) and is_behind_name:
            continue  # the columns of an array
        elif is_system and is_sign(node, "&"):
            continue  # a mark of alignment
        else:
            result.append(node)
    return result


def _without_brackets(nodes: list[Node]) -> list[Node]:
    r"""Names a matrix by the brackets around it, and drops them; writes `\pmatrix{...}` as an environment."""
    if not nodes:
        return nodes
    first = nodes[0]
    last = nodes[-1]
    is_in_brackets = is_sign(first, "[", "(") and is_sign(last, "]", ")")
    inner = nodes[1:-1] if is_in_brackets else nodes
    if len(inner) == 2 and is_sign(inner[0], *_OLD_MATRICES) and isinstance(inner[1], Group):
        return _environment(_MATRIX, inner[1].body)
    starts = [place for place, node in enumerate(nodes) if is_sign(node, r"\begin")]
    if starts != [1] or len(nodes) < 5:
        return nodes  # no environment behind a bracket, or several
    ends_without_bracket = is_sign(nodes[-2], r"\end")
    if is_sign(first, r"\{") and ends_without_bracket:  # `\left\{\begin{array}{l}...\end{array}\right.`
        return _environment(_CASES, nodes[3:-2])
    if not is_sign(nodes[-3], r"\end"):
        return nodes
    if is_in_brackets:
        return inner
    if is_sign(first, "|") and is_sign(last, "|"):
        return _environment(_DETERMINANT, nodes[3:-3])
    return nodes


def _environment(name: Group, body: Sequence[Node]) -> list[Node]:
    return [Token("command", r"\begin"), name, *body, Token("command", r"\end"), name]
