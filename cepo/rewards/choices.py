"""Which option of a multiple-choice question an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from cepo.rewards.answers import normalise_answer

LETTERS = string.ascii_uppercase[:10]
"""A to J; no benchmark offers more options."""

_LEAD = re.compile(
    r"^(?:the\s+)?(?:(?:final|correct|right|best)\s+)*(?:answer|option|choice)\s*(?:is|:|=)?\s*:?\s*", re.IGNORECASE
)
_MARKUP = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|boxed|bf|rm)(?![A-Za-z])|[\\*$`{}]|\"")
_LETTERS_ALONE = re.compile(r"[(\[]?[A-J][)\].:]?(?:(?:\s*[,;&/]\s*|\s+)(?:and\s+)?[(\[]?[A-J][)\].:]?)*")
_LETTER_BEFORE_TEXT = re.compile(r"[(\[]?(?P<letter>[A-J])(?:[)\]][.:]?|[.:])\s*\S")
_OPTIONS_IN_TEXT = re.compile(r"\(([A-J])\)\s*(.*?)(?=[\s,;]*\([A-J]\)|\s*$)", re.DOTALL)


def chosen_letters(answer: str, choices: Sequence[str] = ()) -> frozenset[str]:
    """The letters that `answer` names; empty where it names none.

    Accepted are letters alone (`B`, `(B)`, `\\text{B}.`, `B, D`), one with its text (`B. blue`, `(B) blue`), either behind
    words such as `The answer is` or `Option`, and the text of exactly one option, compared as `normalise_answer` writes
    it and without regard to case. A letter wins over an option whose text is that letter.

    Args:
        choices: the options' texts in the order of their letters; empty where only the letters are known, which are then
            A to J.
    """
    known = LETTERS[: len(choices)] or LETTERS
    plain = re.sub(r"\s+", " ", _MARKUP.sub(" ", answer)).strip()
    for text in (plain, _LEAD.sub("", plain).strip()):
        if _LETTERS_ALONE.fullmatch(text):
            letters = frozenset(re.findall(r"[A-J](?![A-Za-z])", text))
            if letters <= set(known):
                return letters
        named = _LETTER_BEFORE_TEXT.match(text)
        if named and named["letter"] in known:
            return frozenset(named["letter"])
    wanted = _spelled(answer)
    same = [letter for letter, choice in zip(known, choices, strict=False) if wanted and _spelled(choice) == wanted]
    return frozenset(same) if len(same) == 1 else frozenset()


def options_in_text(question: str) -> list[str]:
    """The options that a question lists as `(A) red (B) blue`, in order; empty unless they run from A without a gap."""
    found = _OPTIONS_IN_TEXT.findall(question)
    letters = "".join(letter for letter, _ in found)
    if len(found) < 2 or letters != LETTERS[: len(found)]:
        return []
    return [text.strip() for _, text in found]


def _spelled(text: str) -> str:
    return normalise_answer(text).casefold()
