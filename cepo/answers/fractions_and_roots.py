r"""Gives fractions and roots one spelling: `\frac{a}{b}`, `\sqrt{a}` and `\sqrt[n]{a}`."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.lexer import Group, Node, Token, is_letters, is_number, is_sign, is_word, text_of, with_space

_FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac", r"\nicefrac", r"\sfrac", r"\flatfrac", r"\xfrac")
_BINOMIALS = (r"\binom", r"\dbinom", r"\tbinom")
_WITH_TWO_PARTS: dict[str, str] = {**dict.fromkeys(_FRACTIONS, r"\frac"), **dict.fromkeys(_BINOMIALS, r"\binom")}
_BETWEEN_TWO_PARTS = {r"\over": r"\frac", r"\choose": r"\binom"}
_ACCENTS = (r"\vec", r"\overrightarrow", r"\hat", r"\tilde", r"\overline", r"\bar")


def with_fractions(nodes: list[Node]) -> list[Node]:
    r"""Writes every fraction as `\frac{a}{b}` and every root as `\sqrt{a}` or `\sqrt[n]{a}`."""
    for position, node in enumerate(nodes):
        if is_sign(node, *_BETWEEN_TWO_PARTS):
            command = Token("command", _BETWEEN_TWO_PARTS[text_of(node)], nodes[0].spaced)
            first_part = Group(tuple(with_fractions(nodes[:position])))
            second_part = Group(tuple(with_fractions(nodes[position + 1 :])))
            return [command, first_part, second_part]
    result: list[Node] = []
    remaining = list(nodes)
    while remaining:
        node = remaining.pop(0)
        if text_of(node) in _WITH_TWO_PARTS:
            result.append(Token("command", _WITH_TWO_PARTS[text_of(node)], node.spaced))
            _take_argument(remaining, result)
            _take_argument(remaining, result)
        elif _is_accent_of_letters(node, remaining):
            result.append(node)
            _take_argument(remaining, result)
        elif _is_plain_tex_root(node, remaining):
            index = remaining.pop(0)
            remaining.pop(0)  # `\of`
            result.append(Token("command", r"\sqrt", node.spaced))
            result += [Token("sign", "["), index, Token("sign", "]")]
            take_radicand(remaining, result)
        elif is_sign(node, r"\abs") and remaining and isinstance(remaining[0], Group):
            result += [Token("sign", "|"), *remaining[0].body, Token("sign", "|")]
            remaining.pop(0)
        elif is_sign(node, r"\sqrt", r"\surd") or _is_root_in_words(node, remaining):
            result.append(Token("command", r"\sqrt", node.spaced))
            _take_index(remaining, result)
            take_radicand(remaining, result)
        else:
            result.append(node)
    return result


def _is_accent_of_letters(node: Node, behind: Sequence[Node]) -> bool:
    r"""Returns whether a node is the accent of `\vec v`, whose argument needs no braces."""
    return is_sign(node, *_ACCENTS) and bool(behind) and is_letters(behind[0])


def _is_plain_tex_root(node: Node, behind: Sequence[Node]) -> bool:
    r"""Returns whether a node is the command of `\root 3 \of 8`."""
    return is_sign(node, r"\root") and len(behind) > 2 and is_sign(behind[1], r"\of")


def _is_root_in_words(node: Node, behind: Sequence[Node]) -> bool:
    """Returns whether a node is the word of `sqrt(3)` or `sqrt3`."""
    if not is_word(node, "sqrt") or not behind:
        return False
    return is_sign(behind[0], "(") or is_number(behind[0])


def _take_argument(remaining: list[Node], result: list[Node]) -> None:
    r"""Moves the argument that a command finds next: a group, one character (`\frac12`), or one token."""
    if not remaining or is_sign(remaining[0], "{", "}", "["):
        return  # a brace without partner is no argument
    node = remaining.pop(0)
    if isinstance(node, Group):
        result.append(with_space(node, False))
        return
    text = node.text
    if node.kind in ("number", "letters") and len(text) > 1 and text.isalnum():
        first_character = Token(node.kind, text[0], upright=node.upright)
        other_characters = Token(node.kind, text[1:], upright=node.upright)
        result.append(Group((first_character,)))
        remaining.insert(0, other_characters)
        return
    result.append(Group((with_space(node, False),)))


def _take_index(remaining: list[Node], result: list[Node]) -> None:
    """Moves the index of a root with its brackets, if one comes next."""
    if not remaining or not is_sign(remaining[0], "["):
        return
    for place, node in enumerate(remaining):
        if is_sign(node, "]"):
            length = place + 1
            result.extend(with_space(inner, False) for inner in remaining[:length])
            del remaining[:length]
            return


def take_radicand(remaining: list[Node], result: list[Node]) -> None:
    r"""Moves what stands under a root: a group, the parentheses of `sqrt(...)`, a number after a space, or one token."""
    if remaining and is_sign(remaining[0], "("):
        depth = 0
        for place, node in enumerate(remaining):
            depth += is_sign(node, "(") - is_sign(node, ")")
            if depth == 0:
                result.append(Group(tuple(remaining[1:place])))
                del remaining[: place + 1]
                return
    if remaining and is_number(remaining[0]) and remaining[0].spaced:
        result.append(Group((with_space(remaining.pop(0), False),)))
        return
    _take_argument(remaining, result)
