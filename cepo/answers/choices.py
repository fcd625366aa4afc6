"""Reads which options of a multiple-choice question an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from cepo.answers.lexer import plain_characters
from cepo.answers.statements import LONGEST_ANSWER, read_statement

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
_LETTER_BEFORE_A_REASON = re.compile(
    r"([A-J])\s?,?\s+(?:because|since|due to)\s|([A-J])\s?,\s+(?:which|namely|i\.\s?e\.)\s"
)
_LETTER_BEFORE_A_COMMA = re.compile(r"^\s*([A-J])、")
"""Chinese texts write `A、14` for `A. 14`; elsewhere this comma separates the parts of a list."""
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])")
_SPACE_IN_BRACKETS = re.compile(r"(?<=[(\[]) | (?=[)\]])")
_ENCLOSED_LETTER_OF_GOLD = re.compile(r"\(([A-J])\)\s*[^\s,;]")
"""`(B) 14 cm`"""
_ENCLOSED_VARIABLE = re.compile(r"\([A-J]\)\s*[-+*/^=(]")
"""`(B) + 1` is algebra."""
_LETTERS_OF_GOLD = re.compile(r"\(?[A-J]\)?(?:\s*,\s*\(?[A-J]\)?)*\.?")


def letters_alone(text: str) -> frozenset[str]:
    """Returns the letters of a gold answer that is nothing but capital letters from A to J, such as `B`, `(B)`, `A, C`.

    A word, a variable in lower case and a segment such as `AC` are no choices. `(B) 14 cm` is one.
    """
    plain = _without_markup(text)
    if _LETTERS_OF_GOLD.fullmatch(plain):
        return frozenset(re.findall("[A-J]", plain))
    enclosed = _ENCLOSED_LETTER_OF_GOLD.match(plain)
    if enclosed is None or _ENCLOSED_VARIABLE.match(plain):
        return frozenset()
    return frozenset(enclosed[1])


def chosen_letters(answer: str, choices: Sequence[str] = ()) -> frozenset[str]:
    r"""Returns the letters that `answer` names; empty if it names none.

    Accepted are letters alone in either case (`B`, `b`, `(B)`, `\\text{B}.`, `B, D`), capital letters together (`BD`), a
    letter with its text (`B. blue`, `(B) blue`, `b) blue`, `B - blue`) or its reason (`B, because it is blue`), each also
    after words such as `The answer is` or `Option`, and the text of exactly one option, compared after
    `normalise_answer` and ignoring case. A capital letter
    takes precedence over an option whose text is that letter; a small letter does not. `choices` are the options' texts in
    the order of their letters; without them, all letters from A to J are allowed.
    """
    known_letters = set(LETTERS[: len(choices)] or LETTERS)
    same_text = _letters_of_same_text(answer, choices)
    _, _, text_behind_comma = answer.partition("、")
    if len(text_behind_comma.strip()) > 1:
        answer = _LETTER_BEFORE_A_COMMA.sub(r"\1. ", answer)
    plain = _without_markup(plain_characters(answer))
    for text in (plain, _LEAD.sub("", plain).strip()):
        letters = _letters_in(text)
        has_capital = text != text.lower()
        if letters and letters <= known_letters and (has_capital or len(same_text) != 1):
            return letters
    return same_text if len(same_text) == 1 else frozenset()


def _without_markup(text: str) -> str:
    """Returns a text without commands and marks, and without spaces within its brackets."""
    plain = " ".join(_MARKUP.sub(" ", text).split())
    return _SPACE_IN_BRACKETS.sub("", plain)


def _letters_in(text: str) -> frozenset[str]:
    """Returns the letters that a text without markup begins with or consists of."""
    if _LETTERS_ALONE.fullmatch(text):
        return frozenset(letter.upper() for letter in _SINGLE_LETTER.findall(text))
    letters = text.removesuffix(".")
    is_without_repetition = len(set(letters)) == len(letters)
    if _LETTERS_TOGETHER.fullmatch(letters) and is_without_repetition:
        return frozenset(letters)
    reasoned = _LETTER_BEFORE_A_REASON.match(text)
    if reasoned is not None:
        return frozenset(reasoned[1] or reasoned[2])
    match = _LETTER_BEFORE_TEXT.match(text)
    if match is None:
        return frozenset()
    letter = match["enclosed"] or match["closed"] or match["pointed"] or match["dashed"]
    return frozenset(letter.upper())


def _letters_of_same_text(answer: str, choices: Sequence[str]) -> frozenset[str]:
    """Returns the letters of the options whose text the answer is; none if one of the texts is too long."""
    longest = max(len(text) for text in (answer, *choices))
    if longest > LONGEST_ANSWER:
        return frozenset()
    options = zip(LETTERS, choices, strict=False)
    return frozenset(letter for letter, choice in options if spelled_alike(answer, choice))


def spelled_alike(first: str, second: str) -> bool:
    """Returns whether two texts have the same normal form and unit, ignoring case; never for empty texts."""
    first_statement = read_statement(first)
    second_statement = read_statement(second)
    first_text = first_statement.value.casefold()
    second_text = second_statement.value.casefold()
    return first_text == second_text != "" and first_statement.unit == second_statement.unit
