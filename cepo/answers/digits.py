r"""Numbers of several tokens in one spelling: thousands (`1,234`), `1.6e-19`, `.5`, and mixed numbers (`13 1/3`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cepo.answers.lexer import Group, Node, Token, is_number, is_sign, read_nodes, text_of

_SPACE = r"(?:\s|~|\\[,;:>/ ])+"
_THOUSANDS = re.compile(
    rf"(?<![\d.,])[1-9]\d{{0,2}}(?P<separator>,(?:\\!)?|\{{,\}}|{_SPACE})\d{{3}}(?:(?P=separator)\d{{3}})*(?:\.\d+)?(?!\d|,\d)"
)
REPETEND = r"\overline"
"""The command that marks the digits of a decimal that repeat."""


def joined_thousands(text: str, commas: bool) -> str:
    """Writes `1,234`, `1{,}234` and `1 234` as 1234.

    A comma joins digits only if `commas` is true and it stands outside of brackets: `(1,234)` is a pair. Digits are
    joined if the first part has one to three of them and no leading zero, and every other part exactly three.
    """

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        depth = sum(map(before.count, ("(", "[", r"\{"))) - sum(map(before.count, (")", "]", r"\}")))
        is_comma = match["separator"].startswith(",")
        is_fraction = not is_comma and text[match.end() :].lstrip().startswith("/")  # `2 333/500`
        is_kept = is_fraction or (is_comma and (depth > 0 or not commas))
        return match[0] if is_kept else match[0].replace(match["separator"], "")

    return _THOUSANDS.sub(joined, text)


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
