"""Splits an answer in normal form into its parts: lists, tuples, sets, matrices, ratios and systems of equations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cepo.answers.brackets import CLOSING_BRACKETS, OPENING_BRACKETS, closes_last, split_outside_brackets
from cepo.answers.exact_numbers import Real, floating
from cepo.answers.latex_symbols import written
from cepo.answers.lexer import Group, Node, Token, is_sign, read_nodes, text_of
from cepo.answers.numbers import value_of
from cepo.answers.statements import named_parts

MOST_PARTS = 64
_SAME_RATIO = 1e-30
"""The relative difference up to which two quotients are equal."""


@dataclass(frozen=True)
class Parts:
    """An answer of several parts.

    Attributes:
        kind: `list` (`1, 2`; `1 or 2`), `tuple` (`(1,2)`), `set`, `matrix`, or `ratio` (`1:2:3`).
        items: the texts of the parts; of a matrix, row by row.
        row: the number of columns of a matrix, else 0.
    """

    kind: str
    items: tuple[str, ...]
    row: int = 0


@lru_cache(maxsize=4096)
def parts_of(text: str) -> Parts | None:
    """Returns the parts of an answer in normal form, or None if it is one value."""
    nodes = read_nodes(text)
    if not nodes:
        return None
    if is_sign(nodes[0], r"\begin"):
        return _matrix(nodes) or _system(nodes)
    items = split_outside_brackets(nodes, _is_separator)
    if len(items) > 1:
        return _parts("list", _texts_with_both_signs(items))
    terms = split_outside_brackets(nodes, lambda node: is_sign(node, ":"))
    if len(terms) > 2:
        return _parts("ratio", [written(term) for term in terms])
    if _is_in_brackets(nodes):
        items = split_outside_brackets(nodes[1:-1], _is_separator)
        if is_sign(nodes[-1], r"\}"):
            return _parts("set", _texts_with_both_signs(items))
        return _parts("tuple", _texts_with_both_signs(items)) if len(items) > 1 else None
    values = _with_both_signs(nodes)
    return _parts("list", values) if len(values) > 1 else None


def _is_in_brackets(nodes: Sequence[Node]) -> bool:
    """Returns whether one pair of matching brackets encloses all nodes."""
    opening = text_of(nodes[0])
    if not is_sign(nodes[0], *OPENING_BRACKETS):
        return False
    closing = CLOSING_BRACKETS[OPENING_BRACKETS.index(opening)]
    return is_sign(nodes[-1], closing) and closes_last(nodes)


@lru_cache(maxsize=4096)
def without_parentheses(text: str) -> str:
    """Returns `x<60` for `(x<60)`; a tuple or interval keeps its parentheses."""
    nodes = read_nodes(text)
    if len(nodes) < 3 or not is_sign(nodes[0], "(") or not is_sign(nodes[-1], ")") or not closes_last(nodes):
        return text
    inner = nodes[1:-1]
    is_tuple = len(split_outside_brackets(inner, _is_separator)) > 1
    return text if is_tuple else written(inner)


@lru_cache(maxsize=4096)
def without_point_name(text: str) -> str:
    """Returns `(2,3)` for `A(2,3)`; anything else stays as it is."""
    nodes = read_nodes(text)
    if len(nodes) < 6 or not re.fullmatch("[A-Z]", text_of(nodes[0])) or not is_sign(nodes[1], "("):
        return text
    coordinates = nodes[1:]
    if not is_sign(coordinates[-1], ")") or not closes_last(coordinates):
        return text
    is_tuple = len(split_outside_brackets(coordinates[1:-1], _is_separator)) > 1
    return written(coordinates) if is_tuple else text


def _parts(kind: str, items: Sequence[str], row: int = 0) -> Parts | None:
    """Returns the parts, or None if one is empty or there are too many."""
    is_complete = all(items) and len(items) <= MOST_PARTS
    return Parts(kind, tuple(items), row) if is_complete else None


def _is_separator(node: Node) -> bool:
    is_word = isinstance(node, Token) and node.kind == "letters" and node.text in ("or", "and")
    return is_word or is_sign(node, ",", ";")


def _texts_with_both_signs(items: Sequence[Sequence[Node]]) -> list[str]:
    texts: list[str] = []
    for item in items:
        texts += _with_both_signs(item)
    return texts


def _with_both_signs(nodes: Sequence[Node]) -> list[str]:
    r"""Returns `1+2` and `1-2` for `1\pm2`, also within groups (`\frac{1\pm2}{3}`); else the one text."""
    if _number_of_double_signs(nodes) != 1:
        return [written(nodes)]
    return [written(_with_sign(nodes, sign)) for sign in "+-"]


def _number_of_double_signs(nodes: Sequence[Node]) -> int:
    count = 0
    for node in nodes:
        if isinstance(node, Group):
            count += _number_of_double_signs(node.body)
        elif is_sign(node, r"\pm", r"\mp"):
            count += 1
    return count


def _with_sign(nodes: Sequence[Node], sign: str) -> list[Node]:
    """Returns nodes with this sign for the double one, and without a plus where a term begins."""
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_with_sign(node.body, sign)), node.spaced))
            continue
        if not is_sign(node, r"\pm", r"\mp"):
            result.append(node)
            continue
        begins_term = not result or is_sign(result[-1], "=", "(")
        if sign == "-" or not begins_term:
            result.append(Token("sign", sign))
    return result


def _matrix(nodes: list[Node]) -> Parts | None:
    ends = [place for place, node in enumerate(nodes) if is_sign(node, r"\end")]
    if len(ends) != 1 or ends[0] != len(nodes) - 2 or len(nodes) < 5:
        return None
    if written([nodes[1]]) != "{pmatrix}":
        return None
    rows = _lines(nodes[2:-2])
    if not rows[-1]:
        rows.pop()
    cells: list[str] = []
    num_columns = 0
    for number, row in enumerate(rows):
        row_cells = split_outside_brackets(row, lambda node: is_sign(node, "&"))
        if number == 0:
            num_columns = len(row_cells)
        if len(row_cells) != num_columns:
            return None
        cells += [written(cell) for cell in row_cells]
    return _parts("matrix", cells, num_columns) if cells else None


def _system(nodes: list[Node]) -> Parts | None:
    r"""Reads the lines of `\begin{cases}x=2\\y=3\end{cases}` as a list; a function by cases is None."""
    num_ends = sum(is_sign(node, r"\end") for node in nodes)
    is_one_environment = num_ends == 1 and len(nodes) > 4 and is_sign(nodes[-2], r"\end")
    if not is_one_environment or written([nodes[1]]) != "{cases}":
        return None
    is_function = any(is_sign(node, "&") for node in nodes)
    if is_function:
        return None
    return _parts("list", [written(line) for line in _lines(nodes[2:-2]) if line])


def _lines(nodes: Sequence[Node]) -> list[list[Node]]:
    return split_outside_brackets(nodes, lambda node: is_sign(node, r"\\"))


def same_parts(first: Parts, second: Parts, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two answers have the same parts: in any order for lists and sets, proportional for ratios."""
    if len(first.items) != len(second.items) or first.row != second.row:
        return False
    kinds = {first.kind, second.kind}
    if "ratio" in kinds:
        return first.kind == second.kind and _are_proportional(first.items, second.items)
    if "matrix" in kinds and first.kind != second.kind:
        return False
    if kinds == {"set", "tuple"}:
        return False
    pairs = zip(first.items, second.items, strict=True)
    if all(same(first_item, second_item) for first_item, second_item in pairs):
        return True
    is_ordered = "tuple" in kinds or "matrix" in kinds
    return not is_ordered and _same_in_some_order(first.items, second.items, same)


def _same_in_some_order(first: Sequence[str], second: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    first_names = [_name_of(item) for item in first]
    second_names = [_name_of(item) for item in second]
    is_each_named = all(first_names) and all(second_names)
    if not is_each_named and (_has_several_names(first_names) or _has_several_names(second_names)):
        return False  # `x=1, y=2` does not say which is which of `2, 1`
    unmatched = list(second)
    for item in first:
        name = _name_of(item)
        for candidate in unmatched:
            may_have_name = not name or _name_of(candidate) in ("", name)
            if same(item, candidate) and may_have_name:
                unmatched.remove(candidate)
                break
        else:
            return False
    return True


def _name_of(item: str) -> str:
    """Returns `x` for `x=1`, and an empty text for a value without a name."""
    name, _ = named_parts(item)
    return name


def _has_several_names(names: Sequence[str]) -> bool:
    different_names = {name for name in names if name}
    return len(different_names) > 1


def _are_proportional(first: Sequence[str], second: Sequence[str]) -> bool:
    quotients: list[Real] = []
    for first_term, second_term in zip(first, second, strict=True):
        dividend = value_of(first_term)
        divisor = value_of(second_term)
        if not dividend or not divisor:  # None or 0
            return False
        quotients.append(floating(dividend) / floating(divisor))
    return all(abs(quotient - quotients[0]) <= abs(quotients[0]) * _SAME_RATIO for quotient in quotients)
