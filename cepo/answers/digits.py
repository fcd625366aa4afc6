r"""Numbers of several tokens in one spelling: thousands (`1,234`), `1.6e-19`, `.5`, and mixed numbers (`13 1/3`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cepo.answers.lexer import THREE_DIGITS, Group, Node, Token, depth_change, is_number, is_sign, read_nodes, text_of

_FIRST_DIGITS = re.compile(r"[1-9]\d{0,2}")
REPETEND = r"\overline"
"""The command that marks the digits of a decimal that repeat."""


def merged_thousands(nodes: Sequence[Node], commas: bool) -> list[Node]:
    """Joins the digits of `1,234`, `1{,}234` and `1 234` to one number.

    A comma joins digits only if `commas` is true and it stands outside of brackets: `(1,234)` is a pair. Digits are
    joined if the first part has one to three of them and no leading zero, and every other part exactly three.
    """
    result: list[Node] = []
    depth = 0
    place = 0
    while place < len(nodes):
        node = nodes[place]
        if isinstance(node, Group):
            result.append(Group(tuple(merged_thousands(node.body, commas)), node.spaced))
            place += 1
            continue
        depth += depth_change(node)
        is_behind_a_comma = place > 0 and is_sign(nodes[place - 1], ",")
        is_item = is_behind_a_comma and not node.spaced  # `2,1,234` is a list
        length, text = _thousands_at(nodes, place, commas and depth <= 0 and not is_item)
        is_joined = length > 1
        result.append(Token(node.kind, text, node.spaced, node.upright) if is_joined else node)
        place += length
    return result


def _thousands_at(nodes: Sequence[Node], start: int, commas: bool) -> tuple[int, str]:
    """Returns how many nodes form the number at `start`, and its digits."""
    first_digits = text_of(nodes[start])
    if not is_number(nodes[start]) or not _FIRST_DIGITS.fullmatch(first_digits):
        return 1, first_digits
    text = first_digits
    common_separator = ""
    place = start + 1
    while "." not in text:
        separator, width = _separator_at(nodes, place, commas)
        is_mixed = common_separator != "" and separator != common_separator
        if not separator or is_mixed:
            break
        common_separator = separator
        text += text_of(nodes[place + width])
        place += width + 1
    if place < len(nodes):
        behind = nodes[place]
        is_a_fraction = common_separator == " " and is_sign(behind, "/")  # `2 333/500`
        is_a_list = common_separator == "," and is_sign(behind, ",") and _is_tight(nodes, place + 1)  # `1,234,5`
        if is_a_fraction or is_a_list:
            return 1, first_digits
    return place - start, text


def _is_tight(nodes: Sequence[Node], place: int) -> bool:
    """Returns whether a number without a space before it stands at `place`."""
    return place < len(nodes) and is_number(nodes[place]) and not nodes[place].spaced


def _separator_at(nodes: Sequence[Node], place: int, commas: bool) -> tuple[str, int]:
    """Returns the separator of thousands at `place` and its number of nodes: 0 for a space; or an empty text."""
    if place >= len(nodes):
        return "", 0
    node = nodes[place]
    if _is_three_digits(node):
        return (" ", 0) if node.spaced else ("", 0)
    if place + 1 >= len(nodes) or not _is_three_digits(nodes[place + 1]):
        return "", 0
    if isinstance(node, Group):
        is_comma = len(node.body) == 1 and is_sign(node.body[0], ",")
        return ("{,}", 1) if is_comma else ("", 0)
    if node.spaced or nodes[place + 1].spaced:
        return "", 0
    return (",", 1) if commas and is_sign(node, ",") else ("", 0)


def _is_three_digits(node: Node) -> bool:
    return is_number(node) and THREE_DIGITS.fullmatch(text_of(node)) is not None


def with_numbers(nodes: list[Node]) -> list[Node]:
    r"""Writes `1.6e-19` as `1.6\cdot10^{-19}`, `.5` as `0.5`, `5.` as `5`, and `13 1/3` as `13\frac{1}{3}`."""
    result: list[Node] = []
    for place, node in enumerate(nodes):
        previous = result[-1] if result else None
        if _is_needless_point(nodes, place, previous):
            continue
        if not isinstance(node, Token) or node.kind != "number":
            result.append(node)
            continue
        mantissa, _, exponent = node.text.lower().partition("e")
        is_digit_behind_point = previous is not None and is_number(previous) and not node.spaced
        if mantissa.startswith(".") and not is_digit_behind_point:
            mantissa = "0" + mantissa
        if exponent:
            result += _scientific(mantissa, exponent, node.spaced, previous)
        else:
            result.append(Token("number", mantissa, node.spaced))
    return _with_mixed_numbers(result)


def _is_needless_point(nodes: Sequence[Node], place: int, previous: Node | None) -> bool:
    """Returns whether the point at `place` ends an integer, as in `5. cm`, and begins no decimals."""
    node = nodes[place]
    if not is_sign(node, ".") or node.spaced or previous is None or not is_number(previous):
        return False
    if place + 1 >= len(nodes):
        return False
    following = nodes[place + 1]
    return not is_number(following) and not is_sign(following, ".", REPETEND)


def _scientific(mantissa: str, exponent: str, spaced: bool, previous: Node | None) -> list[Node]:
    r"""Returns the nodes of `1.6\cdot10^{-19}`, in a group where it is a divisor or an exponent."""
    power = Group(tuple(read_nodes(exponent.removeprefix("+"))))
    factor = [Token("command", r"\cdot"), Token("number", "10"), Token("sign", "^"), power]
    if previous is not None and is_sign(previous, "/", "^", r"\div"):
        return [Group((Token("number", mantissa), *factor), spaced)]
    return [Token("number", mantissa, spaced), *factor]


def _with_mixed_numbers(nodes: list[Node]) -> list[Node]:
    r"""Writes `13 1/3` as `13\frac{1}{3}`."""
    result: list[Node] = []
    place = 0
    while place < len(nodes):
        is_behind_a_number = bool(result) and is_number(result[-1])
        if _is_mixed_number(nodes[place : place + 4]) and not is_behind_a_number:
            integer, numerator, _, denominator = nodes[place : place + 4]
            result += [integer, Token("command", r"\frac"), _group_of(numerator), _group_of(denominator)]
            place += 4
        else:
            result.append(nodes[place])
            place += 1
    return result


def _is_mixed_number(nodes: Sequence[Node]) -> bool:
    """Returns whether nodes are an integer, a space and a fraction of two integers with a slash."""
    if len(nodes) != 4 or not is_sign(nodes[2], "/") or not nodes[1].spaced:
        return False
    return all(is_number(node) and text_of(node).isdigit() for node in (nodes[0], nodes[1], nodes[3]))


def _group_of(number: Node) -> Group:
    return Group((Token("number", text_of(number)),))
