r"""Reads intervals and inequalities: `(1,3]`, `1 < x \leq 3`, `x < 1 or x > 3`, `\{x | x > 3\}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cepo.answers.brackets import split_outside_brackets
from cepo.answers.latex_symbols import written
from cepo.answers.lexer import Node, is_sign, read_nodes, text_of
from cepo.answers.numbers import value_of


@dataclass(frozen=True)
class Interval:
    r"""The numbers from `low` to `high`: `(1,3]`, or `1 < x \leq 3`.

    Attributes:
        variable: what lies in the interval, or an empty text.
        has_low, has_high: whether the ends belong to it.
    """

    low: str
    high: str
    has_low: bool
    has_high: bool
    variable: str = ""


_ALL_NUMBERS = (r"\mathbb{r}", "allrealnumbers", "allreals", r"x\in\mathbb{r}")
"""Spellings of the interval of all real numbers in small letters and, as in every normal form, without spaces."""
_MINUS_INFINITY = r"-\infty"
_INFINITY = r"\infty"
_RELATIONS = ("<", ">", r"\leq", r"\geq")
_FLIPPED = {">": "<", r"\geq": r"\leq"}
_VARIABLE = re.compile(r"[A-Za-z]|\\[A-Za-z]+(?:_\w)?|[A-Za-z]_(?:\w|\{\w+\})")


@lru_cache(maxsize=4096)
def intervals_of(text: str) -> tuple[Interval, ...]:
    r"""Returns the intervals whose union an answer states: of `(1,3]`, `1<x\leq3`, `x<1 or x>3`; else none."""
    if text.casefold() in _ALL_NUMBERS:
        return (Interval(_MINUS_INFINITY, _INFINITY, has_low=False, has_high=False),)
    nodes = _condition_of_set(read_nodes(text))
    variable = ""
    if len(nodes) > 2 and is_sign(nodes[1], r"\in"):
        variable = written(nodes[:1])
        nodes = nodes[2:]
    intervals: list[Interval] = []
    for piece in split_outside_brackets(nodes, _joins_intervals):
        interval = _bracketed(piece, variable) or _inequality(piece)
        if interval is None:
            return ()
        intervals.append(interval)
    return tuple(intervals)


def _joins_intervals(node: Node) -> bool:
    return is_sign(node, r"\cup", r"\lor") or text_of(node) == "or"


def _condition_of_set(nodes: list[Node]) -> list[Node]:
    r"""Returns the condition of `\{x|x>3\}` or `\{x\in\mathbb{R}:x>3\}`; other nodes are unchanged."""
    if len(nodes) <= 5 or not is_sign(nodes[0], r"\{") or not is_sign(nodes[-1], r"\}"):
        return nodes
    is_of_real_numbers = written(nodes[2:5]) == r"\in\mathbb{R}"
    place_of_bar = 5 if is_of_real_numbers else 2
    if not is_sign(nodes[place_of_bar], "|", ":"):
        return nodes
    return nodes[place_of_bar + 1 : -1]


def _bracketed(nodes: list[Node], variable: str) -> Interval | None:
    """Reads `(1,3]`, and `]1,3]`, whose reversed bracket leaves the end out."""
    if len(nodes) < 5 or not is_sign(nodes[0], "(", "[", "]") or not is_sign(nodes[-1], ")", "]", "["):
        return None
    ends = split_outside_brackets(nodes[1:-1], lambda node: is_sign(node, ","))
    if len(ends) != 2 or not ends[0] or not ends[1]:
        return None
    return Interval(
        low=_text_of_end(ends[0]),
        high=_text_of_end(ends[1]),
        has_low=is_sign(nodes[0], "["),
        has_high=is_sign(nodes[-1], "]"),
        variable=variable,
    )


def _text_of_end(nodes: Sequence[Node]) -> str:
    text = written(nodes)
    return _INFINITY if text == r"+\infty" else text


def _inequality(nodes: list[Node]) -> Interval | None:
    r"""Reads `x<3`, `3>x` and `1<x\leq3`; None for relations in different directions and for other sides."""
    relations = [text_of(node) for node in nodes if is_sign(node, *_RELATIONS)]
    sides = [written(side) for side in split_outside_brackets(nodes, lambda node: is_sign(node, *_RELATIONS))]
    if not relations or len(sides) != len(relations) + 1 or len(sides) > 3 or not all(sides):
        return None
    if all(relation in _FLIPPED for relation in relations):
        relations = [_FLIPPED[relation] for relation in reversed(relations)]
        sides.reverse()
    if any(relation in _FLIPPED for relation in relations):
        return None
    includes_ends = [relation == r"\leq" for relation in relations]
    if len(sides) == 3:
        low, variable, high = sides
        if not _is_variable(variable):
            return None
        return Interval(low, high, includes_ends[0], includes_ends[1], variable)
    low, high = sides
    if _is_variable(low) and value_of(high) is not None:
        return Interval(_MINUS_INFINITY, high, has_low=False, has_high=includes_ends[0], variable=low)
    if _is_variable(high) and value_of(low) is not None:
        return Interval(low, _INFINITY, has_low=includes_ends[0], has_high=False, variable=high)
    return None


def _is_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None and value_of(text) is None  # π is a number


def same_interval(first: Interval, second: Interval, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two intervals have the same ends, and the same variable if both name one."""
    if first.variable and second.variable and first.variable != second.variable:
        return False
    if first.has_low != second.has_low or first.has_high != second.has_high:
        return False
    return same(first.low, second.low) and same(first.high, second.high)
