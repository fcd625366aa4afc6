"""Reads the text of an answer as tokens, and the tokens as a tree of groups in braces."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["number", "letters", "command", "sign"]


@dataclass(frozen=True)
class Token:
    r"""A number (`12.5`), a run of letters, a command (`\frac`) or another character.

    Attributes:
        spaced: whether a space stands before it.
        upright: whether it stands in `\text{}` or `\mathrm{}`, where letters are words or units and not variables.
    """

    kind: Kind
    text: str
    spaced: bool = False
    upright: bool = False


@dataclass(frozen=True)
class Group:
    """What stands between a pair of braces."""

    body: tuple[Node, ...]
    spaced: bool = False


Node = Token | Group


def is_sign(node: Node, *texts: str) -> bool:
    """Returns whether a node is one of these signs or commands."""
    return isinstance(node, Token) and node.kind in ("sign", "command") and node.text in texts


def is_number(node: Node) -> bool:
    """Returns whether a node is a number token."""
    return isinstance(node, Token) and node.kind == "number"


def is_letters(node: Node) -> bool:
    """Returns whether a node is a run of letters."""
    return isinstance(node, Token) and node.kind == "letters"


def is_word(node: Node, *words: str) -> bool:
    """Returns whether a node is one of these words, in small or capital letters."""
    return isinstance(node, Token) and node.kind == "letters" and node.text.lower() in words


def text_of(node: Node) -> str:
    """Returns the text of a token, and an empty one for a group."""
    return node.text if isinstance(node, Token) else ""


def with_space(node: Node, spaced: bool = True) -> Node:
    """Returns the node with or without a space before it."""
    return node if node.spaced == spaced else replace(node, spaced=spaced)


_CHARACTERS = {
    "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "′": "'", "’": "'", "‘": "'", "ʹ": "'", "″": '"', "”": '"', "“": '"',
    "℃": r"^\circ C", "℉": r"^\circ F",
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "＋": "+", "π": r"\pi ", "∠": r"\angle ",
    "≅": r"\cong ", "≈": r"\approx ", "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "•": r"\cdot ",
    "∙": r"\cdot ", "÷": r"\div ", "∶": ":", "：": ":", "⁄": "/", "∕": "/", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ",
    "⩾": r"\geq ", "≠": r"\neq ", "∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "Ω": r"\Omega ",
    "\u2126": r"\Omega ", "µ": r"\mu ", "μ": r"\mu ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "λ": r"\lambda ", "φ": r"\varphi ", "ω": r"\omega ", "Δ": r"\Delta ", "△": r"\triangle ", "∥": r"\parallel ",
    "⊥": r"\perp ", "∼": r"\sim ", "∣": "|", "，": ",", "、": ",", "。": ".", "…": "...", "⟨": r"\langle ", "⟩": r"\rangle ",
    "ℝ": r"\mathbb{R}", "ℂ": r"\mathbb{C}", "ℚ": r"\mathbb{Q}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "∅": r"\emptyset ",
}  # fmt: skip
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+")
_LOWERED = re.compile("[₀-₉₊₋]+")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?)?")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")


def plain_characters(text: str) -> str:
    """Returns the text with ASCII characters or LaTeX commands for the Unicode signs, digits, fractions and exponents."""
    if text.isascii():
        return text
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = _RAISED.sub(_exponent, text)
    text = _LOWERED.sub(_index, text)
    text = _ROOT.sub(_root, text)
    plain = "".join(_plain_character(character) for character in text)
    return plain.replace("\u2212", "-")


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _exponent(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0])
    return f"^{{{digits}}}"


def _index(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0])
    return f"_{{{digits}}}"


def _root(match: re.Match[str]) -> str:
    radicand = f"{{{match[2]}}}" if match[2] else ""
    return rf"\sqrt{_ROOTS[match[1]]}{radicand}"


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.digit(character))
    if category == "Zs":
        return " "
    if category == "Cf":  # a mark without width
        return ""
    compatible = unicodedata.normalize("NFKC", character)
    if compatible.isascii():
        return compatible
    return _CHARACTERS.get(compatible, character)


_RELATIONS = {"<=": r"\leq", ">=": r"\geq", "!=": r"\neq"}
_TOKEN = re.compile(
    r"(?P<nothing>\\!)|(?P<space>\s+|~|\\[,;:>/ ]|\\\s)"
    r"|(?P<number>(?:\d+\.\d+|\.\d+|\d+)(?:[eE][+-]?\d+(?!\d|\.\d))?)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<relation><=|>=|(?<=[\sA-Za-z])!=)"  # `5!=120` is a factorial
    r"|(?P<command>\\(?:[A-Za-z]+\*?|\\|.))"
    r"|(?P<sign>.)",
    re.DOTALL,
)


def read_nodes(text: str) -> list[Node]:
    r"""Returns the tree of a text; a brace without partner is a sign.

    `\\` is one token, so that `\\ 2` in a matrix holds no space command. `1.6e-19` is one number, because no space
    stands in it; in `2 e - 3` and `2e` the `e` is a letter.
    """
    bodies: list[list[Node]] = [[]]  # the nodes of the text and of each brace that is open
    spaces: list[bool] = []  # whether a space stands before each of these braces
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "nothing":
            continue
        if kind == "space":
            spaced = True
            continue
        if kind == "relation":
            bodies[-1].append(Token("command", _RELATIONS[match[0]], spaced))
        elif match[0] == "{":
            bodies.append([])
            spaces.append(spaced)
        elif match[0] == "}" and spaces:
            body = bodies.pop()
            bodies[-1].append(Group(tuple(body), spaces.pop()))
        else:
            bodies[-1].append(Token(kind, match[0], spaced))  # type: ignore[arg-type]
        spaced = False
    while spaces:
        body = bodies.pop()
        bodies[-1].append(Token("sign", "{", spaces.pop()))
        bodies[-1].extend(body)
    return bodies[0]
