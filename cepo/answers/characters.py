"""Writes Unicode signs, digits, fractions and exponents as ASCII characters and LaTeX commands."""

from __future__ import annotations

import re
import unicodedata

from cepo.answers.tables import SIGNS

_CHARACTERS: dict[str, str] = SIGNS["characters"]
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
    return _CHARACTERS.get(compatible, compatible)
