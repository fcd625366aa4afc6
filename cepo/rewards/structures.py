r"""Splits an answer in normal form into its parts: lists, tuples, sets, matrices, ratios, intervals and inequalities."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cepo.rewards.numbers import floating, value_of
from cepo.rewards.statements import named_parts
from cepo.rewards.tokens import Group, Node, Token, is_sign, read_nodes, text_of
from cepo.rewards.writing import written

MOST_PARTS = 64


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`: `(1,3]`, or `1 < x \\leq 3`.

    Attributes:
        variable: what lies in the interval, or an empty text.
        has_low, has_high: whether the ends belong to it.
    """

    low: str
    high: str
    has_low: bool
    has_high: bool
    variable: str = ""


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


_ALL_NUMBERS = (r"\mathbb{r}", "allrealnumbers", "allreals", r"x\in\mathbb{r}")
"""Spellings of the interval of all real numbers in small letters and, as in every normal form, without spaces."""
_OPENING = ("(", "[", r"\{", r"\langle")
_CLOSING = (")", "]", r"\}", r"\rangle")
_RELATIONS = ("<", ">", r"\leq", r"\geq")
_FLIPPED = {">": "<", r"\geq": r"\leq"}


@lru_cache(maxsize=4096)
def parts_of(text: str) -> Parts | None:
    """Returns the parts of an answer in normal form, or None if it is one value."""
    nodes = read_nodes(text)
    if not nodes:
        return None
    if is_sign(nodes[0], r"\begin"):
        return _matrix(nodes) or _system(nodes)
    items = _split_at(nodes, _is_separator)
    if len(items) > 1:
        return _listed("list", [text for item in items for text in _with_both_signs(item)])
    ratio = _split_at(nodes, lambda node: is_sign(node, ":"))
    if len(ratio) > 2:
        return _listed("ratio", [written(item) for item in ratio])
    closing = _CLOSING[_OPENING.index(nodes[0].text)] if is_sign(nodes[0], *_OPENING) else ""  # type: ignore[union-attr]
    if closing and is_sign(nodes[-1], closing) and _closes_last(nodes):
        inside = _split_at(nodes[1:-1], _is_separator)
        kind = "set" if closing == r"\}" else "tuple"
        if len(inside) > 1 or kind == "set":
            return _listed(kind, [text for item in inside for text in _with_both_signs(item)])
        return None
    signs = _with_both_signs(nodes)
    return _listed("list", signs) if len(signs) > 1 else None


@lru_cache(maxsize=4096)
def without_parentheses(text: str) -> str:
    """Returns `x<60` for `(x<60)`; a tuple or interval keeps its parentheses."""
    nodes = read_nodes(text)
    if len(nodes) < 3 or not is_sign(nodes[0], "(") or not is_sign(nodes[-1], ")") or not _closes_last(nodes):
        return text
    return text if len(_split_at(nodes[1:-1], _is_separator)) > 1 else written(nodes[1:-1])


@lru_cache(maxsize=4096)
def without_point_name(text: str) -> str:
    """Returns `(2,3)` for `A(2,3)`; anything else stays as it is."""
    nodes = read_nodes(text)
    if len(nodes) < 6 or not re.fullmatch("[A-Z]", text_of(nodes[0])) or not is_sign(nodes[1], "("):
        return text
    is_tuple = is_sign(nodes[-1], ")") and _closes_last(nodes[1:]) and len(_split_at(nodes[2:-1], _is_separator)) > 1
    return written(nodes[1:]) if is_tuple else text


def _listed(kind: str, items: Sequence[str]) -> Parts | None:
    is_whole = all(items) and len(items) <= MOST_PARTS
    return Parts(kind, tuple(items)) if is_whole else None


def _is_separator(node: Node) -> bool:
    return is_sign(node, ",", ";") or (
        isinstance(node, Token) and node.kind == "letters" and node.text in ("or", "and")
    )


def _split_at(nodes: Sequence[Node], is_separator: Callable[[Node], bool]) -> list[list[Node]]:
    """Splits nodes at the separators outside of brackets."""
    parts: list[list[Node]] = [[]]
    depth = 0
    for node in nodes:
        depth += is_sign(node, *_OPENING) - is_sign(node, *_CLOSING)
        if depth == 0 and is_separator(node):
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def _closes_last(nodes: Sequence[Node]) -> bool:
    """Returns whether the first bracket is closed by the last one."""
    depth = 0
    for node in nodes[:-1]:
        depth += is_sign(node, *_OPENING) - is_sign(node, *_CLOSING)
        if depth <= 0:
            return False
    return True


def _with_both_signs(nodes: Sequence[Node]) -> list[str]:
    r"""Returns `1+2` and `1-2` for `1\pm2`, also within groups (`\frac{1\pm2}{3}`); else the one text."""
    if _number_of_double_signs(nodes) != 1:
        return [written(nodes)]
    return [written(_with_sign(nodes, sign)) for sign in "+-"]


def _number_of_double_signs(nodes: Sequence[Node]) -> int:
    count = 0
    for node in nodes:
        count += _number_of_double_signs(node.body) if isinstance(node, Group) else is_sign(node, r"\pm", r"\mp")
    return count


def _with_sign(nodes: Sequence[Node], sign: str) -> list[Node]:
    """Returns nodes with this sign for the double one, and without a plus where a term begins."""
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Group):
            result.append(Group(tuple(_with_sign(node.body, sign)), node.spaced))
        elif not is_sign(node, r"\pm", r"\mp"):
            result.append(node)
        elif sign == "-" or (result and not is_sign(result[-1], "=", "(")):
            result.append(Token("sign", sign))
    return result


def _matrix(nodes: list[Node]) -> Parts | None:
    ends = [place for place, node in enumerate(nodes) if is_sign(node, r"\end")]
    if len(ends) != 1 or ends[0] != len(nodes) - 2 or len(nodes) < 5:
        return None
    name = written([nodes[1]])
    if name != "{pmatrix}":
        return None
    rows = _split_at(nodes[2:-2], lambda node: is_sign(node, r"\\"))
    if not rows[-1]:
        rows.pop()
    cells = [[written(cell) for cell in _split_at(row, lambda node: is_sign(node, "&"))] for row in rows]
    if not cells or any(len(row) != len(cells[0]) for row in cells):
        return None
    found = _listed("matrix", [cell for row in cells for cell in row])
    return Parts("matrix", found.items, len(cells[0])) if found else None


def _system(nodes: list[Node]) -> Parts | None:
    r"""Reads the lines of `\begin{cases}x=2\\y=3\end{cases}` as a list; a function by cases is None."""
    is_whole = sum(is_sign(node, r"\end") for node in nodes) == 1 and len(nodes) > 4 and is_sign(nodes[-2], r"\end")
    if not is_whole or written([nodes[1]]) != "{cases}" or any(is_sign(node, "&") for node in nodes):
        return None
    lines = [line for line in _split_at(nodes[2:-2], lambda node: is_sign(node, r"\\")) if line]
    return _listed("list", [written(line) for line in lines])


@lru_cache(maxsize=4096)
def intervals_of(text: str) -> tuple[Interval, ...]:
    r"""Returns the intervals whose union an answer states: of `(1,3]`, `1<x\leq3`, `x<1 or x>3`; else none."""
    if text.casefold() in _ALL_NUMBERS:
        return (Interval(r"-\infty", r"\infty", False, False),)
    nodes = read_nodes(text)
    if len(nodes) > 5 and is_sign(nodes[0], r"\{") and is_sign(nodes[-1], r"\}"):
        # `\{x|x>3\}` or `\{x\in\mathbb{R}:x>3\}`: what counts is the condition.
        start = 5 if written(nodes[2:5]) == r"\in\mathbb{R}" else 2
        if is_sign(nodes[start], "|", ":"):
            nodes = nodes[start + 1 : -1]
    variable = ""
    if len(nodes) > 2 and is_sign(nodes[1], r"\in"):
        variable = written(nodes[:1])
        nodes = nodes[2:]
    pieces = _split_at(nodes, lambda node: is_sign(node, r"\cup", r"\lor") or text_of(node) == "or")
    intervals: list[Interval] = []
    for piece in pieces:
        interval = _bracketed(piece, variable) or _inequality(piece)
        if interval is None:
            return ()
        intervals.append(interval)
    return tuple(intervals)


def _bracketed(nodes: list[Node], variable: str) -> Interval | None:
    if len(nodes) < 5 or not is_sign(nodes[0], "(", "[", "]") or not is_sign(nodes[-1], ")", "]", "["):
        return None
    ends = _split_at(nodes[1:-1], lambda node: is_sign(node, ","))
    if len(ends) != 2 or not ends[0] or not ends[1]:
        return None
    return Interval(_end(ends[0]), _end(ends[1]), is_sign(nodes[0], "["), is_sign(nodes[-1], "]"), variable)


def _end(nodes: Sequence[Node]) -> str:
    text = written(nodes)
    return text.removeprefix("+") if text == r"+\infty" else text


def _inequality(nodes: list[Node]) -> Interval | None:
    signs = [node.text for node in nodes if isinstance(node, Token) and is_sign(node, *_RELATIONS)]
    sides = [written(side) for side in _split_at(nodes, lambda node: is_sign(node, *_RELATIONS))]
    if not signs or len(sides) != len(signs) + 1 or len(sides) > 3 or not all(sides):
        return None
    if all(sign in _FLIPPED for sign in signs):
        signs = [_FLIPPED[sign] for sign in reversed(signs)]
        sides.reverse()
    if any(sign in _FLIPPED for sign in signs):
        return None
    includes = [sign == r"\leq" for sign in signs]
    if len(sides) == 3:
        return Interval(sides[0], sides[2], includes[0], includes[1], sides[1]) if _is_variable(sides[1]) else None
    if _is_variable(sides[0]) and value_of(sides[1]) is not None:
        return Interval(r"-\infty", sides[1], False, includes[0], sides[0])
    if _is_variable(sides[1]) and value_of(sides[0]) is not None:
        return Interval(sides[0], r"\infty", includes[0], False, sides[1])
    return None


def _is_variable(text: str) -> bool:
    return (
        re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+(?:_\w)?|[A-Za-z]_(?:\w|\{\w+\})", text) is not None
        and value_of(text) is None
    )


def same_interval(first: Interval, second: Interval, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two intervals have the same ends, and the same variable if both name one."""
    if first.variable and second.variable and first.variable != second.variable:
        return False
    if (first.has_low, first.has_high) != (second.has_low, second.has_high):
        return False
    return same(first.low, second.low) and same(first.high, second.high)


def same_parts(first: Parts, second: Parts, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two answers have the same parts: in any order for lists and sets, proportional for ratios."""
    if len(first.items) != len(second.items) or first.row != second.row:
        return False
    if "ratio" in (first.kind, second.kind):
        return first.kind == second.kind and _proportional(first.items, second.items)
    if "matrix" in (first.kind, second.kind) and first.kind != second.kind:
        return False
    in_order = all(same(left, right) for left, right in zip(first.items, second.items, strict=True))
    if in_order or "tuple" in (first.kind, second.kind) or "matrix" in (first.kind, second.kind):
        return in_order and {first.kind, second.kind} not in ({"set", "tuple"},)
    return _same_in_some_order(first, second, same)


def _same_in_some_order(first: Parts, second: Parts, same: Callable[[str, str], bool]) -> bool:
    names = [[named_parts(item)[0] for item in parts.items] for parts in (first, second)]
    if any(len(set(filter(None, given))) > 1 for given in names) and not all(all(given) for given in names):
        return False  # `x=1, y=2` does not say which is which of `2, 1`
    left = list(second.items)
    for item in first.items:
        name = named_parts(item)[0]
        equals = [other for other in left if same(item, other) and (not name or named_parts(other)[0] in ("", name))]
        if not equals:
            return False
        left.remove(equals[0])
    return True


def _proportional(first: Sequence[str], second: Sequence[str]) -> bool:
    values = [(value_of(left), value_of(right)) for left, right in zip(first, second, strict=True)]
    if any(left is None or right is None or not left or not right for left, right in values):
        return False
    shares = [floating(left) / floating(right) for left, right in values]
    return all(abs(share - shares[0]) <= abs(shares[0]) * 1e-30 for share in shares)
