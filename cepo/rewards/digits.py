r"""Joins digits to numbers: thousands (`1,234`), scientific notation (`1.6e-19`), `.5`, and mixed numbers (`13 1/3`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cepo.rewards.tokens import Group, Node, Token, is_number, is_sign, read_nodes, text_of, with_space

REPETENDS = (r"\overline", r"\bar", r"\dot")
"""Commands that mark the digits of a decimal that repeat."""


def merged_thousands(nodes: Sequence[Node], commas: bool) -> list[Node]:
    """Joins the digits of `1,234`, `1{,}234`, `1'234` and `1 234` to one number.

    A comma joins digits only if `commas` is true and it stands outside of brackets: `(1,234)` is a pair. Digits are
    joined if the first part has one to three of them and no leading zero, and every other part exactly three.
    """
    result: list[Node] = []
    depth = 0
    position = 0
    while position < len(nodes):
        node = nodes[position]
        if isinstance(node, Group):
            result.append(Group(tuple(merged_thousands(node.body, commas)), node.spaced))
            position += 1
            continue
        depth += is_sign(node, "(", "[", r"\{") - is_sign(node, ")", "]", r"\}")
        in_a_list = position > 0 and is_sign(nodes[position - 1], ",")
        length, text = _thousands_at(nodes, position, commas and depth <= 0 and not (in_a_list and not node.spaced))
        result.append(Token(node.kind, text, node.spaced, node.upright) if length > 1 else node)
        position += length
    return result


def _thousands_at(nodes: Sequence[Node], position: int, commas: bool) -> tuple[int, str]:
    """Returns how many nodes form the number at `position`, and its digits."""
    first = nodes[position]
    text = text_of(first)
    if not is_number(first) or not re.fullmatch(r"[1-9]\d{0,2}", text):
        return 1, text
    chosen = ""
    place = position + 1
    while True:
        separator, width = _separator_at(nodes, place, commas)
        if not separator or (chosen and separator != chosen) or "." in text:
            break
        digits = nodes[place + width]
        assert isinstance(digits, Token)
        text += digits.text
        chosen = separator
        place += width + 1
    behind = nodes[place] if place < len(nodes) else None
    is_a_fraction = chosen == " " and behind is not None and is_sign(behind, "/")
    goes_on = chosen == "," and behind is not None and is_sign(behind, ",") and _is_tight_number(nodes, place + 1)
    if is_a_fraction or goes_on:
        return 1, first.text  # type: ignore[union-attr]
    return place - position, text


def _is_tight_number(nodes: Sequence[Node], place: int) -> bool:
    return place < len(nodes) and is_number(nodes[place]) and not nodes[place].spaced


THREE_DIGITS = re.compile(r"\d{3}(?:\.\d+)?")


def _separator_at(nodes: Sequence[Node], place: int, commas: bool) -> tuple[str, int]:
    """Returns the separator of thousands at `place` and its number of nodes: 0 for a space; or an empty text."""

    def is_part(index: int, spaced: bool) -> bool:
        if index >= len(nodes) or not is_number(nodes[index]) or nodes[index].spaced != spaced:
            return False
        return THREE_DIGITS.fullmatch(text_of(nodes[index])) is not None

    if place >= len(nodes):
        return "", 0
    if is_part(place, spaced=True):
        return " ", 0
    node = nodes[place]
    if isinstance(node, Group):
        is_comma = len(node.body) == 1 and is_sign(node.body[0], ",")
        return ("{,}", 1) if is_comma and (is_part(place + 1, False) or is_part(place + 1, True)) else ("", 0)
    if node.spaced or not is_part(place + 1, spaced=False):
        return "", 0
    if is_sign(node, "'"):
        return "'", 1
    return (",", 1) if commas and is_sign(node, ",") else ("", 0)


def with_numbers(nodes: list[Node]) -> list[Node]:
    r"""Writes `1.6e-19` as `1.6\cdot10^{-19}`, `.5` as `0.5`, `5.` as `5`, and `13 1/3` as `13\frac{1}{3}`."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = result[-1] if result else None
        if position > 0 and _is_exponent(nodes, position - 1):
            continue  # the e of the number before
        if is_sign(node, ".") and not node.spaced and previous is not None and is_number(previous):
            following = nodes[position + 1] if position + 1 < len(nodes) else None
            if following is not None and not is_sign(following, ".", *REPETENDS) and not is_number(following):
                continue
        if not isinstance(node, Token) or node.kind != "number":
            result.append(node)
            continue
        text = node.text
        if text.startswith(".") and not (previous is not None and is_number(previous) and not node.spaced):
            text = "0" + text
        if _is_exponent(nodes, position):
            text += "e" + text_of(nodes[position + 2])
        if position > 1 and _is_exponent(nodes, position - 2):
            continue
        mantissa, _, exponent = text.lower().partition("e")
        if not exponent:
            result.append(Token("number", text, node.spaced))
            continue
        power = Group(tuple(read_nodes(exponent.removeprefix("+"))))
        parts = [
            Token("number", mantissa), Token("command", r"\cdot"), Token("number", "10"), Token("sign", "^"), power,
        ]  # fmt: skip
        if previous is not None and is_sign(previous, "/", "^", r"\div"):
            result.append(Group(tuple(parts), node.spaced))
        else:
            result.extend([with_space(parts[0], node.spaced), *parts[1:]])
    return _with_mixed_numbers(result)


def _is_exponent(nodes: list[Node], position: int) -> bool:
    r"""Returns whether a number at `position` has an upright e and its exponent behind it: `3\mathrm{e}8`."""
    three = nodes[position : position + 3]
    if len(three) < 3 or not is_number(three[0]) or not is_number(three[2]):
        return False
    letter = three[1]
    return isinstance(letter, Token) and letter.upright and letter.text in ("e", "E") and text_of(three[2]).isdigit()


def _with_mixed_numbers(nodes: list[Node]) -> list[Node]:
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        four = nodes[position : position + 4]
        whole = [
            node.text for node in four if isinstance(node, Token) and node.kind == "number" and node.text.isdigit()
        ]
        behind_a_point = bool(result) and is_number(result[-1])
        if len(four) == 4 and len(whole) == 3 and is_sign(four[2], "/") and four[1].spaced and not behind_a_point:
            fraction = [Token("command", r"\frac"), *(Group((Token("number", text),)) for text in whole[1:])]
            result.extend([four[0], *fraction])
            position += 4
        else:
            result.append(nodes[position])
            position += 1
    return result
