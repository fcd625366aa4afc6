"""Splits nodes outside of their brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepo.answers.lexer import Node, is_sign

OPENING_BRACKETS = ("(", "[", r"\{", r"\langle")
CLOSING_BRACKETS = (")", "]", r"\}", r"\rangle")


def depth_change(node: Node) -> int:
    """Returns 1 for an opening bracket, -1 for a closing one, else 0."""
    if is_sign(node, *OPENING_BRACKETS):
        return 1
    return -1 if is_sign(node, *CLOSING_BRACKETS) else 0


def split_outside_brackets(nodes: Sequence[Node], is_separator: Callable[[Node], bool]) -> list[list[Node]]:
    """Splits nodes at the separators outside of brackets."""
    parts: list[list[Node]] = [[]]
    depth = 0
    for node in nodes:
        depth += depth_change(node)
        if depth == 0 and is_separator(node):
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def closes_last(nodes: Sequence[Node]) -> bool:
    """Returns whether the first bracket is closed by the last one."""
    depth = 0
    for node in nodes[:-1]:
        depth += depth_change(node)
        if depth <= 0:
            return False
    return True
