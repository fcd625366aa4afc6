"""Options of a multiple-choice question that an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from cepo.answers.characters import plain_characters
from cepo.answers.statements import LONGEST_ANSWER, folded, read_statement

LETTERS = string.ascii_uppercase[:10]
"""The option letters A to J; no benchmark offers more options."""

_LEADS = (
    re.compile(
        r"^(?:the\s+)?(?:(?:final|correct|right|best)\s+)*(?:answer|option|choice|letter)s?\s*(?:is|are|:|=)?\s*:?\s*",
        re.IGNORECASE,
    ),
    re.compile(
        r"^(?:i\s+(?:think|believe)\s+)?(?:it|this|that)(?:\s+(?:is|must\s+be|should\s+be)|'s)\s+", re.IGNORECASE
    ),
    re.compile(r"^(?:so|thus|therefore|hence)\s*,?\s+", re.IGNORECASE),
    re.compile(
        r"^(?:故|因此|所以|本题)?\s*,?\s*(?:应|正确)?(?:答案|选项|选择|选)(?:应)?(?:是|为)?\s*:?\s*(?:选项)?\s*"
    ),
)
"""Words before a letter: `The answer is`, `I think it is`, `故选:`."""
_MARKUP = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|boxed|fbox|bf|rm|[,;:! ]|quad)(?![A-Za-z])|[\\*$`{}~]|\""
)
_LETTER = r"[(\[]?[A-Ja-j][)\].:]?"
_LETTERS_ALONE = re.compile(rf"{_LETTER}(?:(?:\s*[,;&/和]\s*|\s+)(?:(?:and|AND)\s+)?{_LETTER})*")
_LETTERS_TOGETHER = re.compile(r"[A-J]{2,}")
_LISTED_LETTERS = re.compile(r"\(?[A-J]\)?(?:(?:\s*[,;]\s*|\s+)(?:and\s+)?\(?[A-J]\)?)+\.?")
_LETTER_BEFORE_TEXT = re.compile(
    r"(?:[(\[](?P<enclosed>[A-Ja-j])[)\]][.:]?|(?P<closed>[A-Ja-j])\)[.:]?|(?P<pointed>[A-J])[\].:]|(?P<dashed>[A-J])\s+[-–—])\s*(?!(?:or|and|nor)\b)\S"
)
_LETTER_BEFORE_A_REASON = re.compile(
    r"([A-J])\s?,?\s+(?:because|since|due\s+to)\s|([A-J])\s?,\s+(?:which|namely|not|i\.\s?e\.)\s"
    r"|([A-J])\s+is\s+(?:the\s+)?(?:correct|right|best)\b|([A-J])\s*(?:,\s*(?:因为|由于)|是?正确|选?项)"
)
_BOLD_LETTER = re.compile(
    r"\s*(?:\*\*|\\textbf\{)\s*\(?(?P<letter>[A-J])\)?\s*(?:\*\*|\})\s*"
    r"(?::|is\s(?!(?:false|too|excluded|impossible|unlikely)\b))"
)
"""`**B**: 14 cm` and `**B** is what the graph shows`, but not `**B** is wrong` or `**B** can be excluded`."""
_LETTER_BEHIND_TEXT = re.compile(r"(?P<text>[^()]*[^()\s])\s+\((?P<letter>[A-J])\)[.\s]*")
"""`43.5 million (A)`"""
_NEGATION = re.compile(r"\b(?:not|neither|nor|no|except|wrong|incorrect)\b|n't\b|不", re.IGNORECASE)
_LETTER_BEFORE_A_COMMA = re.compile(r"^\s*([A-J])、")
"""Chinese texts write `A、14` for `A. 14`; elsewhere this comma separates the parts of a list."""
_BEHIND_A_LETTER = re.compile(
    r"(?<![A-Za-z\\])[A-Ja-j](?![A-Za-z])[)\]}*]*(?:\s*[.:、]|\s[-–—]\s)?[)\]}*\s]*(?P<text>.*)", re.DOTALL
)
_END_OF_CLAUSE = re.compile(r"[.,;:](?=\s|\Z)|\s\(|\n")
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])")
_SPACE_IN_BRACKETS = re.compile(r"(?<=[(\[]) | (?=[)\]])")
_ENCLOSED_LETTER_OF_TRUTH = re.compile(r"\(([A-J])\)\s*[^\s,;]")
"""`(B) 14 cm`"""
_ENCLOSED_VARIABLE = re.compile(r"\([A-J]\)\s*[-+*/^=(]")
"""`(B) + 1` is algebra."""
_LETTERS_OF_TRUTH = re.compile(r"\(?[A-J]\)?(?:\s*,\s*\(?[A-J]\)?)*\.?")


def letters_of_truth(text: str) -> frozenset[str]:
    """Returns the letters of a right answer that is nothing but capital letters from A to J, such as `B`, `(B)`, `A, C`.

    A word, a variable in lower case and a segment such as `AC` are no choices. `(B) 14 cm` is one.
    """
    plain = _without_markup(text)
    if _LETTERS_OF_TRUTH.fullmatch(plain):
        return frozenset(re.findall("[A-J]", plain))
    enclosed = _ENCLOSED_LETTER_OF_TRUTH.match(plain)
    if enclosed is None or _ENCLOSED_VARIABLE.match(plain):
        return frozenset()
    return frozenset(enclosed[1])


def same_letters_together(answer: str, truth: str) -> bool:
    """Returns whether an answer lists the letters of a truth such as `ACD`, which may also be a word or a figure."""
    letters = _without_markup(truth)
    is_ascending = list(letters) == sorted(set(letters))
    if not _LETTERS_TOGETHER.fullmatch(letters) or not is_ascending:
        return False
    listed = _LISTED_LETTERS.fullmatch(_without_markup(plain_characters(answer)))
    return listed is not None and set(_SINGLE_LETTER.findall(listed[0])) == set(letters)


def chosen(text: str, choices: Sequence[str] = ()) -> frozenset[str]:
    r"""Returns the letters that an answer names; empty if it names none.

    Accepted are letters alone in either case (`B`, `b`, `(B)`, `\text{B}.`, `B, D`), capital letters together (`BD`), a
    letter with its text (`B. blue`, `(B) blue`, `b) blue`, `B - blue`, `blue (B)`) or its reason (`B, because it is
    blue`, `**B** is blue`), each also after words such as `The answer is`, `Option`, `故选:`, and the text of exactly one
    option, compared in normal form and ignoring case. A capital letter takes precedence over an option whose text is that
    letter; a small letter does not. A letter with the text of another option names none.

    Args:
        text: the answer of a response, such as `final_answer` finds.
        choices: the options' texts in the order of their letters; without them, all letters from A to J are allowed.
    """
    letters = _named_letters(text, choices)
    return frozenset() if _has_text_of_another_option(text, letters, choices) else letters


def names_another_option(text: str, choices: Sequence[str]) -> bool:
    """Returns whether beside the only letter of an answer stands the text of another option: `A. blue` where B is blue."""
    return _has_text_of_another_option(text, _named_letters(text, choices), choices)


def _has_text_of_another_option(text: str, letters: frozenset[str], choices: Sequence[str]) -> bool:
    """Returns whether beside the only one of the letters that an answer names stands the text of another option."""
    if len(letters) != 1 or not choices:
        return False
    options_beside: set[str] = set()
    for spelling in (text, _without_markup(plain_characters(text))):
        in_front = _LETTER_BEHIND_TEXT.fullmatch(spelling)
        behind = _BEHIND_A_LETTER.search(spelling)
        for match in (in_front, behind):
            if match is not None:
                clause, *_ = _END_OF_CLAUSE.split(match["text"], maxsplit=1)
                options_beside |= _letters_of_same_text(match["text"], choices)
                options_beside |= _letters_of_same_text(clause, choices)
    return bool(options_beside) and not letters & options_beside


def _named_letters(text: str, choices: Sequence[str]) -> frozenset[str]:
    """Returns the letters that an answer names, whatever the text beside them."""
    known_letters = set(LETTERS[: len(choices)] or LETTERS)
    same_text = _letters_of_same_text(text, choices)
    _, _, text_behind_comma = text.partition("、")
    if len(text_behind_comma.strip()) > 1:
        text = _LETTER_BEFORE_A_COMMA.sub(r"\1. ", text)
    plain = _without_markup(plain_characters(text))
    without_leads = [lead.sub("", plain, count=1).strip() for lead in _LEADS]
    for candidate in (plain, *without_leads):
        letters = _letters_in(candidate)
        has_capital = candidate != candidate.lower()
        if letters and letters <= known_letters and (has_capital or len(same_text) != 1):
            return letters
    if len(same_text) == 1:
        return same_text
    marked = _BOLD_LETTER.match(text) or _LETTER_BEHIND_TEXT.fullmatch(plain)
    if marked is None or marked["letter"] not in known_letters or _NEGATION.search(plain):
        return frozenset()
    return frozenset(marked["letter"])


def _without_markup(text: str) -> str:
    """Returns a text without commands and marks, and without spaces within its brackets."""
    plain = " ".join(_MARKUP.sub(" ", text).split())
    return _SPACE_IN_BRACKETS.sub("", plain)


def _letters_in(text: str) -> frozenset[str]:
    """Returns the letters that a text without markup begins with or consists of."""
    text = text.removesuffix(",")
    if _LETTERS_ALONE.fullmatch(text):
        return frozenset(letter.upper() for letter in _SINGLE_LETTER.findall(text))
    letters = text.removesuffix(".")
    is_without_repetition = len(set(letters)) == len(letters)
    if _LETTERS_TOGETHER.fullmatch(letters) and is_without_repetition:
        return frozenset(letters)
    reasoned = _LETTER_BEFORE_A_REASON.match(text)
    if reasoned is not None:
        return frozenset(letter for letter in reasoned.groups() if letter)
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
    return frozenset(letter for letter, choice in options if same_spelling(answer, choice))


def same_spelling(first: str, second: str) -> bool:
    """Returns whether two texts have the same normal form and unit, ignoring case; never for empty texts."""
    first_statement = read_statement(first)
    second_statement = read_statement(second)
    first_text = folded(first_statement.value)
    second_text = folded(second_statement.value)
    return first_text == second_text != "" and first_statement.unit == second_statement.unit
