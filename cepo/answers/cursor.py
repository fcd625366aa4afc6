"""Reads nodes one after the other: the base of the readers of numbers and units."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.lexer import Node, is_sign


class NodeCursor:
    """A place in a sequence of nodes, which moves forward."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._place: int = 0

    def _peek(self, ahead: int = 0) -> Node | None:
        """Returns the next node, or the one `ahead` nodes behind it; None behind the last one."""
        place = self._place + ahead
        return self._nodes[place] if place < len(self._nodes) else None

    def _next_is(self, *texts: str) -> bool:
        """Returns whether the next node is one of these signs or commands."""
        node = self._peek()
        return node is not None and is_sign(node, *texts)

    def _skip(self, *texts: str) -> bool:
        """Moves past the next node if it is one of these signs or commands; returns whether it was."""
        is_next = self._next_is(*texts)
        if is_next:
            self._place += 1
        return is_next
