"""Reads which options of a multiple-choice question an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from cepo.rewards.statements import LONGEST_ANSWER, read_statement
from cepo.rewards.tokens import plain_characters

LETTERS = string.ascii_uppercase[:10]
"""The option letters A to J; no benchmark offers more options."""

_LEAD = re.compile(
    r"^(?:the\s+)?(?:(?:final|correct|right|best)\s+)*(?:answer|option|choice)s?\s*(?:is|are|:|=)?\s*:?\s*",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|boxed|fbox|bf|rm|[,;:! ]|quad)(?![A-Za-z])|[\\*$`{}~]|\""
)
_LETTER = r"[(\[]?[A-Ja-j][)\].:]?"
_LETTERS_ALONE = re.compile(rf"{_LETTER}(?:(?:\s*[,;&/]\s*|\s+)(?:(?:and|AND)\s+)?{_LETTER})*")
_LETTERS_TOGETHER = re.compile(r"[A-J]{2,}")
_LETTER_BEFORE_TEXT = re.compile(
    r"(?:[(\[](?P<enclosed>[A-Ja-j])[)\]][.:]?|(?P<closed>[A-Ja-j])\)[.:]?|(?P<pointed>[A-J])[\].:]|(?P<dashed>[A-J])\s+[-–—])\s*\S"
)
_LETTER_BEFORE_A_COMMA = re.compile(r"^\s*([A-J])、")
"""Chinese texts write `A、14` for `A. 14`; elsewhere this comma separates the parts of a list."""
_LETTERS_OF_GOLD = re.compile(r"\(?[A-J]\)?(?:\s*,\s*\(?[A-J]\)?)*\.?")


def letters_alone(text: str) -> frozenset[str]:
    """Returns the letters of a gold answer that is nothing but capital letters from A to J, such as `B`, `(B)`, `A, C`.

    A word, a variable in lower case and a segment such as `AC` are no choices. `(B) 14 cm` is one.
    """
    plain = _without_markup(text)
    if _LETTERS_OF_GOLD.fullmatch(plain):
        return frozenset(re.findall("[A-J]", plain))
    enclosed = re.match(r"\(([A-J])\)\s*[^\s,;]", plain)
    return frozenset(enclosed[1]) if enclosed and not re.match(r"\([A-J]\)\s*[-+*/^=(]", plain) else frozenset()


def chosen_letters(answer: str, choices: Sequence[str] = ()) -> frozenset[str]:
    r"""Returns the letters that `answer` names; empty if it names none.

    Accepted are letters alone in either case (`B`, `b`, `(B)`, `\\text{B}.`, `B, D`), capital letters together (`BD`), a
    letter with its text (`B. blue`, `(B) blue`, `b) blue`, `B - blue`), each also after words such as `The answer is` or
    `Option`, and the text of exactly one option, compared after `normalise_answer` and ignoring case. A capital letter
    takes precedence over an option whose text is that letter; a small letter does not. `choices` are the options' texts in
    the order of their letters; without them, all letters from A to J are allowed.
    """
    known = LETTERS[: len(choices)] or LETTERS
    same = _same_texts(answer, choices)
    answer = _LETTER_BEFORE_A_COMMA.sub(r"\1. ", answer) if len(answer.partition("、")[2].strip()) > 1 else answer
    plain = _without_markup(plain_characters(answer))
    for text in (plain, _LEAD.sub("", plain).strip()):
        letters = _letters_in(text)
        if letters and letters <= set(known) and (text != text.lower() or len(same) != 1):
            return letters
    return same if len(same) == 1 else frozenset()


def _without_markup(text: str) -> str:
    """Returns a text without commands and marks, and without spaces within its brackets."""
    plain = re.sub(r"\s+", " ", _MARKUP.sub(" ", text)).strip()
    return re.sub(r"(?<=[(\[]) | (?=[)\]])", "", plain)


def _letters_in(text: str) -> frozenset[str]:
    """Returns the letters that a text without markup begins with or consists of."""
    if _LETTERS_ALONE.fullmatch(text):
        found = re.findall(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])", text)
        return frozenset(letter.upper() for letter in found)
    together = text.removesuffix(".")
    if _LETTERS_TOGETHER.fullmatch(together) and len(set(together)) == len(together):
        return frozenset(together)
    named = _LETTER_BEFORE_TEXT.match(text)
    if named is None:
        return frozenset()
    letter = named["enclosed"] or named["closed"] or named["pointed"] or named["dashed"]
    return frozenset(letter.upper())


def _same_texts(answer: str, choices: Sequence[str]) -> frozenset[str]:
    if max(map(len, (answer, *choices))) > LONGEST_ANSWER:
        return frozenset()
    pairs = zip(LETTERS, choices, strict=False)
    return frozenset(letter for letter, choice in pairs if spelled_alike(answer, choice))


def spelled_alike(first: str, second: str) -> bool:
    """Returns whether two texts have the same normal form and unit, ignoring case; never for empty texts."""
    left = read_statement(first)
    right = read_statement(second)
    return left.value.casefold() == right.value.casefold() != "" and left.unit == right.unit
