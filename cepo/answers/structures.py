"""Answers of several parts: lists, tuples, sets, ratios, and intervals with their inequalities."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cepo.answers.exact_numbers import Real, same_value
from cepo.answers.lexer import (
    CLOSING_BRACKETS,
    OPENING_BRACKETS,
    Node,
    closes_last,
    is_sign,
    read_nodes,
    split_outside_brackets,
    text_of,
    word_of,
    written,
)
from cepo.answers.numbers import value_of
from cepo.answers.statements import named_parts

_MOST_PARTS = 64
_DOUBLE_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z]) ?")
_NEEDLESS_PLUS = re.compile(r"(?:^|(?<=[=({]))\+")


@dataclass(frozen=True)
class Parts:
    """An answer of several parts.

    Attributes:
        kind: `list` (`1, 2`; `1 or 2`), `tuple` (`(1,2)`), `set`, or `ratio` (`1:2:3`).
        items: the texts of the parts.
    """

    kind: str
    items: tuple[str, ...]


@lru_cache(maxsize=4096)
def parts_of(text: str) -> Parts | None:
    """Returns the parts of an answer in normal form, or None if it is one value."""
    nodes = _without_membership(read_nodes(text))
    if not nodes:
        return None
    items = split_outside_brackets(nodes, _is_separator)
    if len(items) > 1:
        return _parts("list", items)
    terms = split_outside_brackets(nodes, lambda node: is_sign(node, ":"))
    if len(terms) > 2:
        return _parts("ratio", terms)
    named = _named_coordinates(nodes)
    if named is not None:
        return named
    if _is_in_brackets(nodes):
        items = split_outside_brackets(nodes[1:-1], _is_separator)
        if is_sign(nodes[-1], r"\}"):
            return _parts("set", items)
        return _parts("tuple", items) if len(items) > 1 else None
    return _parts("list", [nodes]) if len(_with_both_signs(written(nodes))) > 1 else None


def _parts(kind: str, items: Sequence[Sequence[Node]]) -> Parts | None:
    """Returns the parts, or None if one is empty or there are too many."""
    texts: list[str] = []
    for item in items:
        texts += _with_both_signs(written(item))
    is_complete = all(texts) and len(texts) <= _MOST_PARTS
    return Parts(kind, tuple(texts)) if is_complete else None


def _is_separator(node: Node) -> bool:
    return is_sign(node, ",", ";", r"\cup", r"\lor") or word_of(node) in ("or", "and", "和", "或")


def _without_membership(nodes: list[Node]) -> list[Node]:
    r"""Returns `\{1,2\}` for `x\in\{1,2\}`."""
    is_in_a_set = len(nodes) > 3 and is_sign(nodes[1], r"\in") and is_sign(nodes[2], r"\{")
    return nodes[2:] if is_in_a_set else nodes


def _named_coordinates(nodes: Sequence[Node]) -> Parts | None:
    """Returns the list `x=2, y=3` for `(x,y)=(2,3)`, or None."""
    sides = split_outside_brackets(nodes, lambda node: is_sign(node, "="))
    if len(sides) != 2 or not all(side and _is_in_brackets(side) for side in sides):
        return None
    left, right = sides
    names = split_outside_brackets(left[1:-1], _is_separator)
    values = split_outside_brackets(right[1:-1], _is_separator)
    if len(names) != len(values):
        return None
    items: list[str] = []
    for name, value in zip(names, values, strict=True):
        item = f"{written(name)}={written(value)}"
        if _name_of(item) in ("", "="):
            return None
        items.append(item)
    return Parts("list", tuple(items))


def _is_in_brackets(nodes: Sequence[Node]) -> bool:
    """Returns whether one pair of matching brackets encloses all nodes."""
    opening = text_of(nodes[0])
    if not is_sign(nodes[0], *OPENING_BRACKETS):
        return False
    closing = CLOSING_BRACKETS[OPENING_BRACKETS.index(opening)]
    return is_sign(nodes[-1], closing) and closes_last(nodes)


def _is_tuple(nodes: Sequence[Node]) -> bool:
    """Returns whether nodes are several parts in parentheses."""
    is_enclosed = is_sign(nodes[0], "(") and _is_in_brackets(nodes)
    return is_enclosed and len(split_outside_brackets(nodes[1:-1], _is_separator)) > 1


@lru_cache(maxsize=4096)
def without_parentheses(text: str) -> str:
    """Returns `x<60` for `(x<60)`; a tuple keeps its parentheses."""
    nodes = read_nodes(text)
    is_enclosed = len(nodes) > 2 and is_sign(nodes[0], "(") and _is_in_brackets(nodes)
    return written(nodes[1:-1]) if is_enclosed and not _is_tuple(nodes) else text


@lru_cache(maxsize=4096)
def without_point_name(text: str) -> str:
    """Returns `(2,3)` for `A(2,3)`; anything else stays as it is."""
    nodes = read_nodes(text)
    is_point = len(nodes) > 5 and re.fullmatch("[A-Z]", text_of(nodes[0])) and _is_tuple(nodes[1:])
    return written(nodes[1:]) if is_point else text


def _with_both_signs(text: str) -> list[str]:
    r"""Returns `1+2` and `1-2` for `1\pm2`; else the one text."""
    if len(_DOUBLE_SIGN.findall(text)) != 1:
        return [text]
    plus = _NEEDLESS_PLUS.sub("", _DOUBLE_SIGN.sub("+", text))
    return [plus, _DOUBLE_SIGN.sub("-", text)]


def same_parts(first: Parts, second: Parts, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two answers have the same parts: in any order for lists and sets, proportional for ratios."""
    if len(first.items) != len(second.items):
        return False
    kinds = {first.kind, second.kind}
    if "ratio" in kinds:
        return first.kind == second.kind and _are_proportional(first.items, second.items)
    if kinds == {"set", "tuple"}:
        return False
    pairs = list(zip(first.items, second.items, strict=True))
    if all(_may_be_one(*pair) and same(*pair) for pair in pairs):
        return True
    return "tuple" not in kinds and _same_in_some_order(first.items, second.items, same)


def _may_be_one(first: str, second: str) -> bool:
    """Returns whether the names of two items allow that they are one: `x=1` and `y=1` differ, `x_1=1` and `x=1` need not."""
    first_name = _name_of(first)
    second_name = _name_of(second)
    if not first_name or not second_name or first_name == second_name:
        return True
    names_without_index = (first_name.partition("_")[0], second_name.partition("_")[0])
    return names_without_index[0] == names_without_index[1] in (first_name, second_name)


def _same_in_some_order(first: Sequence[str], second: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    first_names = [_name_of(item) for item in first]
    second_names = [_name_of(item) for item in second]
    is_each_named = all(first_names) and all(second_names)
    if not is_each_named and (_has_several_names(first_names) or _has_several_names(second_names)):
        return False  # `x=1, y=2` does not say which is which of `2, 1`
    unmatched = list(second)
    for item in first:
        for candidate in unmatched:
            if _may_be_one(item, candidate) and same(item, candidate):
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
        quotients.append(dividend / divisor)
    return all(same_value(quotient, quotients[0]) for quotient in quotients)


_RELATION = re.compile(r"<|>|\\leq|\\geq")


def is_inequality(text: str) -> bool:
    """Returns whether a text in normal form has a sign such as `<`."""
    return _RELATION.search(text) is not None
