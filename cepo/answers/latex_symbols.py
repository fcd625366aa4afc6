"""Writes nodes as the text of an answer in normal form."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.digits import THREE_DIGITS
from cepo.answers.lexer import Group, Node, is_number, is_sign

ATTACHED_SYMBOLS = {
    "mm", "cm", "dm", "km", "Km", "kg", "Kg", "ml", "mL", "cl", "cL", "dl", "dL", "ft", "in", "yd", "mi", "kN", "kJ", "kW", "kV",
    "mA", "mV", "MW", "Hz", "kHz", "MHz", "Pa", "kPa", "kB", "KB", "MB", "GB", "TB", "Wh", "kWh", "eV", "oz", "lb", "hr", "ha",
    "mol", "min", "cc",
}  # fmt: skip
"""Symbols that are units without a space before them, as in `5cm`; `2mg` may be a product of variables."""
_JOINING_WORDS = ("or", "and")


def written(nodes: Sequence[Node]) -> str:
    """Returns the text of nodes, without spaces but where it would be read differently without them."""
    text = ""
    previous: Node | None = None
    before_previous: Node | None = None
    for node in nodes:
        if previous is not None and _needs_a_space(before_previous, previous, node):
            text += " "
        text += "{" + written(node.body) + "}" if isinstance(node, Group) else node.text
        before_previous = previous
        previous = node
    return text


def _needs_a_space(before_previous: Node | None, previous: Node, node: Node) -> bool:
    """Returns whether a node directly behind the previous one would be read differently."""
    if isinstance(previous, Group) or isinstance(node, Group):
        return False
    if is_number(previous) and is_number(node):
        return node.spaced  # `6 0` is not 60
    if node.kind == "letters" and previous.kind == "letters":
        if previous.text in _JOINING_WORDS or node.text in _JOINING_WORDS:
            return True
        return previous.text + node.text in ATTACHED_SYMBOLS  # `h r` is not `hr`
    ends_in_letter = previous.kind == "command" and previous.text[-1:].isalpha()
    if ends_in_letter and node.text[:1].isalpha():
        return True
    if before_previous is None or not is_number(before_previous):
        return False
    if is_sign(previous, ",") and is_number(node):
        return THREE_DIGITS.fullmatch(node.text) is not None  # `1, 234` is not 1234
    is_e = previous.text in ("e", "E")
    return is_e and (is_number(node) or is_sign(node, "+", "-"))  # `2e -3` is not 0.002
