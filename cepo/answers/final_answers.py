r"""Final answers of responses: a mark (`\boxed{}`, `<answer>`), else a statement (`The answer is 12.`), else a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import dropwhile
from typing import Literal

from cepo.answers.boxes import last_marked_answer
from cepo.answers.choices import LETTERS, chosen, letters_of_truth, names_another_option
from cepo.answers.datetimes import date_of, time_of
from cepo.answers.literals import range_of
from cepo.answers.numbers import value_of
from cepo.answers.statements import LONGEST_ANSWER, read_statement

AnswerKind = Literal["choice", "yes_no", "numeric", "text"]

_END_OF_THINKING = re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/think\]|◁/think▷", re.IGNORECASE)
_CUE = re.compile(
    r"(?:\bthe\s+)?(?:\b(?:final|correct|right|best)\s+)?\banswer\b(?:\s+to\s+[^.:\n]{0,60}?)?[\s*_]*"
    r"(?:\bis(?:\b|(?=n't\b))|\bare\b|\bwould\s+be\b|\bshould\s+be\b|\bmust\s+be\b|:|=)[\s*_:]*"
    r"|\bfinal\s+answer[\s*_#:]*\n[\s*_]*"
    r"|\b(?:correct|right|best)\s+(?:option|choice)[\s*_]*(?:\bis\b|:)[\s*_:]*"
    r"|\b(?:correct|right)\s+(?:value|number|result)\s+is\s+(?=[-+$€£¥\\\d*])"
    r"|\bi\s+(?:would\s+)?(?:choose|select|pick|go\s+with)\s+(?:option\s+)?(?=[*(]*[A-J]\b)"
    r"|答案】?(?:应该?)?(?:是|为)?\s*[:：]?\s*"
    r"|(?<!不)选(?:择|项)?(?:是|为)?\s*[:：]?\s*(?=[(（]?[A-J](?![A-Za-z]))"
    r"|(?:\bwhich|\bit|\bthis|\bthat|\b(?:best|closest)\s+(?:match|fit))\s+(?:is|corresponds\s+to|matches)\s+(?:option|choice)\s+(?=[*(]*[A-J][)*.\s]*\Z)"
    r"|答\s*[:：]\s*(?:[^，。；：\n\d不]{0,20}[是为有](?=\s*[-\d\\$¥]))?",
    re.IGNORECASE,
)
"""The words before a stated answer."""
_OPTION_IS_RIGHT = re.compile(
    r"\b(?i:option|choice|answer)\s+[(*]*(?P<letter>[A-J])[)*]*\s+is\s+(?:the\s+)?(?:correct|right)\b"
)
_NO_STATEMENT = re.compile(
    r"\s*(?:(?:definitely|clearly|probably|certainly)\s+)?"
    r"(?:not\b|n't\b|based\b|in\s+the\s+form\b|one\s+of\b|among\b|不(?:是|对|选)"
    r"|(?:correct|right|wrong|incorrect|unique|clear)(?=\s*(?:[.,;!]|\Z|(?:because|since|as|and)\b)))"
    r"|i\s+(?:made\s+a\s+mistake|was\s+wrong|mis[a-z]+)\b|我[^，。]{0,6}错"
    r"|[\s.*_:,]*\Z",
    re.IGNORECASE,
)
"""What follows the words where they state no answer: `I hope the answer is correct`."""
_SUPPOSED = re.compile(
    r"(?:\b(?:if|whether|suppose|supposing|assume|assuming)"
    r"|(?:\b(?:not|never|nobody|cannot|wrong|incorrect|false)|n't)(?:\s+(?:would|could|should|can|to|be|really|quite|the))*"
    r"\s+(?:say|think|believe|claim|conclude|true|right|correct|case)"
    r"|\b(?:some|many|others|people)\s+(?:(?:may|might|could|would)\s+)?(?:say|think|believe|argue|claim)"
    r"|\b(?:you|one)\s+(?:may|might|could)\s+think"
    r")\s+(?:that\s+)?\Z",
    re.IGNORECASE,
)
"""The words before what is no statement of the response: a supposition, a denial, what others say."""
_WHICH_IS_WRONG = re.compile(
    r"(?:[^.;!?\n]|\.(?=\d)){1,80}?,?\s(?:which|and\s+(?:that|this|it))\s+(?:is|was|would\s+be)\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|true))\b",
    re.IGNORECASE,
)
_SAID_TO_BE_WRONG = re.compile(
    r"(?:[^.;!?\n]|\.(?=\d)){1,80}[.;,!]\s+(?:however|but),?\s+(?:that|this|it)(?:\s+is|'s)\s+"
    r"(?:wrong|incorrect|not\s+(?:right|correct))\b",
    re.IGNORECASE,
)
_OPTION_BESIDE = re.compile(
    r"[,;(]?\s*(?:(?:i\.e\.,?|which\s+(?:is|corresponds\s+to|matches)|that\s+is,?|so)\s+)?(?:the\s+)?(?:option|choice)\s+"
    r"\(?(?P<letter>[A-J])\b(?!\s+(?:is|was|says|would)\b)"
)
"""`(option C)` or `i.e. option C` behind the text of an option."""
_LETTER = r"\(?[A-J]\)?"
_OPTION_TOO = re.compile(
    rf"(?:,\s*(?={_LETTER}(?:,\s*{_LETTER})*(?:,?\s+(?:and|or)\s+{_LETTER})?\s*(?:,?\s*(?:because|since)\b|[.;)]|\Z))"
    r"|[\s,;(]*(?:(?:or|but|as\s+(?:is|are)|as\s+well\s+as|also|possibly|perhaps|maybe)\s+)+)"
    r"(?:(?:option|choice)\s+)?\(?(?P<letter>[A-J])\)?"
    r"(?=\s*(?:[.,;)]|\Z)|\s+(?:and|or|too|because|since|as\s+well|(?:is|are)\s+(?:also|equally|right|correct|true))\b)"
)
"""`, C, because` or `(or C)` or `, but C is also correct` behind an option."""
_TAKEN_BACK = re.compile(
    r"(?:[.,;:!?…，。；！？\n]|\s[-–—])\s*(?:no|wait|sorry|oops|hmm+|actually|correction|不对|错了|等等|等一下|更正)\b"
    r"(?:[,.:!–—，。：！]|\s+(?:no|wait|sorry|actually)\b|(?=\s+(?:it|that|this)\b))+[^\S\n]*"
    r"(?P<is>(?:it|that|this)(?:\s+is|'s)\s+|应?该?是\s*)?",
    re.IGNORECASE,
)
"""The words with which a statement is taken back, in its own line or at the beginning of a later one."""
_MAY_EXPLAIN = re.compile(r"\W*(?:no|actually|hmm+)\W+(?:(?:it|that|this)(?:\s+is|'s)\s+)?", re.IGNORECASE)
_MAY_STATE_ANOTHER = re.compile(
    r"\d|[零一二两三四五六七八九十不错]|(?<![A-Za-z])[A-J](?![A-Za-z])|\A\s*too\b|n't\b"
    r"|(?i:\b(?:yes|no|not|none|never|nothing|nobody|neither|cannot|impossible|wrong|incorrect|should|instead|mis\w+)\b)"
)
"""What a line has that may state another answer, or that the one before it is wrong."""
_INSTEAD = re.compile(
    r"[.,;:!?]\s*(?:no,?\s+)?(?P<is>(?:it|this)(?:\s+is|'s)\s+)|[\s,;]+but\s+|[，。；]\s*(?:而?是|应?选)", re.IGNORECASE
)
"""The words before what holds in place of what a statement denies."""
_BEFORE_A_NUMBER = re.compile(
    r"\A(?:(?:about|approximately|around|roughly|exactly|only|just)\s+(?=[-+$€£¥\\\d*])"
    r"|(?:in|(?:in\s+)?the\s+year)\s+(?=(?:1[5-9]|20)\d\d\b))",
    re.IGNORECASE,
)
_END_OF_ANSWER = re.compile(
    r"[.?](?=\s+[A-Z(*\"“]|\s*\Z)|!(?=\s+[A-Z])|[。！？；，]|[;:](?=\s+[A-Za-z])"
    r"|:(?=\s+\d+\s+(?:in|on|from)\s+the\s+(?!simplest|lowest|form|ratio))"
    r"|,(?=\s+(?:(?!and\b|or\b|[^\s=]+\s*=)[A-Za-z(]|and\s+(?:not|it|this|that|so|there)\b))"
    r"|\s+(?=(?:because|since|which|that|as|when|where|while|due|so|according|and\s+not|but|not)\s)"
    r"|\s+(?=(?:are|were)\s+(?:left|remaining|needed|shown)\b|remain\b|times\s+(?:larger|more|greater|as)\b)"
    r"|\s+(?=(?:in|on|at|for|from)\s+[a-z]{2}|for\s+\d|of\s+(?:the|all|them|these|those|its|people)\b|(?:in|of)\s+(?:19|20)\d\d\b)"
    r"|\s+(?=[(（])|\s+[-–—]\s+(?=[A-Za-z])"
)
"""Where a stated number or option may end and prose may begin."""
_END_OF_SENTENCE = re.compile(
    r"(?<=[A-Za-z]{3})(?<!Mrs)(?<!Inc)(?<!Ltd)[.!?](?=\s+[A-Z])|(?<=[\d)$%\]}])[.!?](?=\s+[A-Z])|。"
    r"|,?\s+(?:because|since)\s|,\s+(?:which|as)\s|,\s+(?:with|at)\s+(?=[$€£¥]?\d)"
)
_MOST_ENDS = 8
_LONGEST_SUPPOSITION = 60
_EMPHASIS = re.compile(r"\*\*(?![\d(])|(?<![\d)])\*\*|__")
_END_OF_BOLD = re.compile(
    r"\A(?P<stated>[^*\n]*[^*\s.:])\.?\*\*\s+"
    r"(?=[A-Za-z\"“])(?!(?:and|or|not|but|is|isn't|was|were|would|can|could|cannot|may|might|must|should|seems|has)\b)"
)
"""The end of a bold statement before prose that does not go on about it, as `is wrong` does."""
_LETTERS_ALONE = re.compile(r"[\s*_]*\(?[A-J]\)?(?:\s*,\s*\(?[A-J]\)?)*[\s.*_:]*")
_BOLD_LETTER = re.compile(r"(?:\*\*|\\textbf\{)\s*\(?[A-J]\)?\s*[.:]?\s*(?:\*\*|\})")
_LETTER_BEFORE_ITS_TEXT = re.compile(r"\A\W*[A-J]\W+(?=\w)")
_NUMBERED_LINE = re.compile(r"\s*\d[.)]\s")
_YES_NO_WORD = r"yes\b|no\b(?!\s+doubt\b)"
_YES_NO = re.compile(rf"\b(?:{_YES_NO_WORD})", re.IGNORECASE)
_BOTH = r"\s*(?:or|and|/)\s*"
_YES_OR_NO = re.compile(
    rf"\byes{_BOTH}no\b|\bno{_BOTH}yes\b|\b(?:not|cannot\s+be|can't\s+be|isn't)\s+(?:yes|no)\b"
    r"|\b(?:otherwise|else),?\s+(?:yes|no)\s*(?:[.,;]|\Z)",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(
    rf"[\s*_\"“(]*(?:(?:so|thus|therefore|hence|wait|actually)\s*,?\s+)?(?P<word>{_YES_NO_WORD})(?P<end>\W*\Z|\s*[,;:–—])?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n]+")


def final_answer(text: str, kind: AnswerKind | None = None, choices: Sequence[str] = ()) -> str | None:
    r"""Returns the final answer of a response, or None if there is none. It is never guessed.

    What follows `</think>` counts, and a mark in the thinking only if nothing behind it is an answer. The last `\boxed{}` or
    `<answer>` counts. Without either, the last statement `answer is ...`, `Answer: ...`, `答案: ...` counts, up to the prose
    behind it, unless it is taken back. Otherwise the last line counts if it is only a letter with or without its
    option, or only a number; then the first line, if it is only that; and of a yes or no question the first sentence that
    begins with either word, or the last line that has one.

    Args:
        text: a response.
        kind: what the answer is: `choice`, `yes_no`, `numeric` or `text`; None if that is not known.
        choices: the options' texts in the order of their letters.
    """
    text = text.replace("’", "'")
    behind_thinking, *thinking = _behind_thinking_first(text)
    answer = _answer_in(behind_thinking, kind, choices)
    if answer is not None or not thinking:
        return answer or None
    marked = last_marked_answer(text)
    if marked is not None or behind_thinking.strip():
        return marked
    return _stated_answer(text, kind, choices)


def _answer_in(text: str, kind: AnswerKind | None, choices: Sequence[str]) -> str | None:
    """Returns the marked answer of a text, else the stated one, else that in a line; a box without an option is no choice."""
    marked = last_marked_answer(text)
    if marked is not None and (kind != "choice" or chosen(marked, choices)):
        return marked
    stated = _stated_answer(text, kind, choices)
    if marked is not None:
        return stated if stated is not None and chosen(stated, choices) else marked
    return stated if stated is not None else _answer_in_a_line(text, kind, choices)


def marked_answer(text: str) -> str | None:
    r"""Returns the last `\boxed{}` of a response, else its last `<answer>`; None if it has none, or a blank one.

    A mark within the thinking counts only if no mark and no statement follows the thinking.
    """
    behind_thinking, *thinking = _behind_thinking_first(text)
    marked = last_marked_answer(behind_thinking)
    if marked is not None or not thinking or _stated_answer(behind_thinking, None, ()) is not None:
        return marked
    return last_marked_answer(text)


def _behind_thinking_first(text: str) -> list[str]:
    """Returns what follows the thinking and then the whole text; or the text alone, if there is no thinking."""
    ends = [match.end() for match in _END_OF_THINKING.finditer(text)]
    return [text[ends[-1] :], text] if ends else [text]


def _stated_answer(text: str, kind: AnswerKind | None, choices: Sequence[str]) -> str | None:
    """Returns what the last statement of a text says, or None if there is no statement."""
    statements = [(match.start(), match.end()) for match in _CUE.finditer(text)]
    if kind == "choice":
        statements += [match.span() for match in _OPTION_IS_RIGHT.finditer(text)]
        statements.sort()
    following_start = len(text)
    for start, end in reversed(statements):
        behind = text[end:following_start]
        if _SUPPOSED.search(text[max(0, start - _LONGEST_SUPPOSITION) : start]):
            following_start = start
            continue
        right_option = _OPTION_IS_RIGHT.match(text, start)
        if right_option is not None and right_option.end() == end:
            behind = f"{right_option['letter']}\n{behind}"
        if text.endswith("**", 0, start) and "**" not in text[start:end]:
            behind = _END_OF_BOLD.sub(r"\g<stated>. ", behind, count=1)  # `**Answer: C** The graph falls.`
        line, _, _ = behind.partition("\n")
        if _SAID_TO_BE_WRONG.match(line):
            return ""
        is_denied = _NO_STATEMENT.match(line) is not None or _WHICH_IS_WRONG.match(line) is not None
        replacing = _replacing_answer(line if is_denied else behind, kind, choices, None if is_denied else line)
        if replacing is not None:
            return replacing
        if not is_denied:
            return _without_prose(_plain_line(line), kind, choices)
        following_start = start
    return None


def _plain_line(line: str) -> str:
    """Returns what a line states without emphasis, and without an adverb such as `about` before a number."""
    return _BEFORE_A_NUMBER.sub("", _EMPHASIS.sub("", line).strip(), count=1)


def _taking_back(text: str, kind: AnswerKind | None, stated: str) -> list[re.Match[str]]:
    """Returns the last places where a text takes back what was stated.

    Within a later line the words are those of an explanation, if none came before them in the first line or at the
    beginning of one.
    """
    line, _, _ = text.partition("\n")

    def is_within_a_later_line(match: re.Match[str]) -> bool:
        return match.start() >= len(line) and "\n" not in match[0]

    matches = dropwhile(is_within_a_later_line, _TAKEN_BACK.finditer(text))
    places = list(matches)[-_MOST_ENDS:]
    if kind == "yes_no" and yes_or_no(stated) == "no":
        return [match for match in places if not _affirms_no(text, match)]
    return places


def _affirms_no(text: str, match: re.Match[str]) -> bool:
    """Returns whether words behind `No.` only say why, as in `No, it is a dog.` or `Actually, it is green.`"""
    behind, _, _ = text[match.end() :].partition("\n")
    is_affirming = _MAY_EXPLAIN.fullmatch(match[0]) is not None
    return is_affirming and _NO_STATEMENT.match(behind) is None and yes_or_no(behind) != "yes"


def _replacing_answer(text: str, kind: AnswerKind | None, choices: Sequence[str], stated: str | None) -> str | None:
    """Returns what a text states last in place of an answer that it denies or takes back; None if it does not.

    `stated` is the answer that it may take back, or None if it denies one. An answer that is said to be wrong, without
    another one, is replaced by these words, which are no answer.
    """
    is_denied = stated is None
    places = [*_INSTEAD.finditer(text)][-_MOST_ENDS:] if stated is None else _taking_back(text, kind, stated)
    options = {choice.casefold() for choice in choices}
    num_words = 0 if stated is None else len(_without_prose(_plain_line(stated), kind, choices).split())
    for match in reversed(places):
        if match[0].strip(" .,!").casefold() in options:  # `(B). No.`
            continue
        behind, _, _ = text[match.end() :].partition("\n")
        answer = _without_prose(_plain_line(behind), kind, choices)
        if kind == "numeric":
            is_answer = _is_quantity(answer)
        elif kind == "choice":
            is_answer = bool(chosen(answer, choices))
        elif kind == "yes_no":
            is_answer = match["is"] is not None or _FIRST_WORD.match(answer) is not None
        else:
            is_answer = match["is"] is not None or 0 < len(answer.split()) <= num_words
        is_taken_back = not is_denied and _NO_STATEMENT.match(behind) is not None
        if is_answer or is_taken_back:
            return answer
    return None


def _without_prose(line: str, kind: AnswerKind | None, choices: Sequence[str]) -> str:
    """Returns the answer with which a line begins: a number, an option, or a sentence."""
    if kind in ("numeric", "choice"):
        ends = [match.start() for match in _END_OF_ANSWER.finditer(line)]
        beginnings = [line[:end].strip() for end in ends[:_MOST_ENDS]]
        if kind == "choice":
            return _option(line, beginnings, choices)
        return next(filter(_is_quantity, beginnings), line)
    if kind == "yes_no":
        return line
    sentence, *_ = _END_OF_SENTENCE.split(line, maxsplit=1)
    return sentence.strip() or line


def _option(line: str, beginnings: Sequence[str], choices: Sequence[str]) -> str:
    """Returns the first beginning of a line that names all options that the line does; the line if there is none."""
    if names_another_option(line, choices):
        return line
    for beginning in (line, *beginnings):
        letters = chosen(beginning, choices)
        behind = line[len(beginning) :]
        if letters and _is_other_option(_OPTION_BESIDE.match(behind.strip()), letters):
            return line
        if letters and not _is_other_option(_OPTION_TOO.match(behind), letters):
            return beginning
    return line


def _is_other_option(match: re.Match[str] | None, letters: frozenset[str]) -> bool:
    """Returns whether what was found behind an answer is another option's letter, as in `4 (option C)` where 4 is B."""
    return match is not None and match["letter"] not in letters


def is_number(text: str) -> bool:
    r"""Returns whether a text states one number, such as `60^\circ`, `2:3` or `5 \sqrt { 3 }`."""
    return len(text) <= LONGEST_ANSWER and value_of(read_statement(text).value) is not None


def _is_quantity(text: str) -> bool:
    return is_number(text) or time_of(text) is not None or date_of(text) is not None or range_of(text) is not None


def kind_of(truth: str) -> AnswerKind:
    """Returns `choice` for one or more letters as in `letters_of_truth`, `numeric` for one number, else `text`."""
    if letters_of_truth(truth):
        return "choice"
    return "numeric" if is_number(truth) else "text"


def _answer_in_a_line(text: str, kind: AnswerKind | None, choices: Sequence[str]) -> str | None:
    """Returns the last or the first line if it is an answer of the kind, or else None."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines or kind not in ("choice", "yes_no", "numeric"):
        return None
    first_line, *further_lines = lines
    last_line = lines[-1]
    behind_first_line = "".join(f"\n{line}" for line in further_lines)
    if kind == "yes_no":
        return _sentence_with_yes_or_no(text, last_line)
    if kind == "choice":
        if chosen(last_line, choices):
            return None if _ends_a_list(lines, choices) else last_line
        is_alone = _is_choice_alone(first_line, further_lines, choices)
        return _unless_taken_back(first_line, behind_first_line, kind, choices) if is_alone else None
    if is_number(last_line):
        return last_line
    if is_number(first_line) and "=" not in first_line:
        return _unless_taken_back(first_line, behind_first_line, kind, choices)
    if further_lines or _NUMBERED_LINE.match(last_line):
        return None
    beginning = _without_prose(last_line, kind, choices)
    prose = last_line[len(beginning) :]
    return _unless_taken_back(beginning, prose, kind, choices) if is_number(beginning) else None


def _unless_taken_back(answer: str, behind: str, kind: AnswerKind, choices: Sequence[str]) -> str | None:
    """Returns an answer, or what the text behind it states in its place; None if that only casts doubt on it."""
    replacing = _replacing_answer(behind, kind, choices, answer)
    if replacing is not None:
        return replacing
    places = _taking_back(behind, kind, answer)
    return answer if all(_only_explains(behind, match, kind, choices) for match in places) else None


def _only_explains(text: str, match: re.Match[str], kind: AnswerKind, choices: Sequence[str]) -> bool:
    """Returns whether what begins with `Actually` states no other answer, as in `Actually, this follows from it.`"""
    behind, _, _ = text[match.end() :].partition("\n")
    may_explain = _MAY_EXPLAIN.fullmatch(match[0]) is not None and "no" not in match[0].casefold()
    if not may_explain or len(behind) > LONGEST_ANSWER or _MAY_STATE_ANOTHER.search(behind):
        return False
    names_option = any(choice.casefold() in behind.casefold() for choice in choices)
    return not names_option and not (kind == "numeric" and any(map(is_number, behind.split())))


def _is_choice_alone(line: str, others: Sequence[str], choices: Sequence[str]) -> bool:
    """Returns whether a line is nothing but letters, or an option where none of the other lines names one."""
    if _LETTERS_ALONE.fullmatch(line):
        return True
    letters = chosen(line, choices)
    text = _LETTER_BEFORE_ITS_TEXT.sub("", _EMPHASIS.sub("", line))
    is_option = _BOLD_LETTER.match(line) is not None or (choices and chosen(text, choices) == letters)
    return bool(letters and is_option) and not any(_names_option(line_below, choices) for line_below in others)


def _ends_a_list(lines: Sequence[str], choices: Sequence[str]) -> bool:
    """Returns whether the last two lines are neighbouring options with their texts, as where a response repeats them all."""
    if len(lines) < 2 or _LETTERS_ALONE.fullmatch(lines[-1]):
        return False
    previous = chosen(lines[-2], choices)
    last = chosen(lines[-1], choices)
    if len(previous) != 1 or len(last) != 1:
        return False
    return LETTERS.index(min(last)) == LETTERS.index(min(previous)) + 1


def _names_option(line: str, choices: Sequence[str]) -> bool:
    return _BOLD_LETTER.search(line) is not None or bool(chosen(line, choices))


def _sentence_with_yes_or_no(text: str, last_line: str) -> str | None:
    """Returns the last line if it is the word, else the first sentence that begins with it, else the last line that has it.

    Sentences that begin with either word and a comma, and say different words, state nothing.
    """
    ends_in_word = yes_or_no(last_line) is not None
    bare_line = _EMPHASIS.sub("", last_line).strip(' .!*_"')
    if ends_in_word and len(bare_line) <= len("yes"):
        return last_line
    sentences: list[re.Match[str]] = []
    for sentence in _SENTENCE.findall(text):
        beginning = _FIRST_WORD.match(sentence)
        if beginning is not None and yes_or_no(sentence) is not None:
            sentences.append(beginning)
    if not sentences:
        return last_line if ends_in_word else None
    first, *later_sentences = sentences
    word = first["word"].lower()
    if any(later["end"] is not None and later["word"].lower() != word for later in later_sentences):
        return None
    behind = text.partition(first.string)[2]
    return _unless_taken_back(first.string.strip(), behind, "yes_no", ())


def yes_or_no(text: str) -> Literal["yes", "no"] | None:
    """Returns which of the words yes and no a text begins with, or has; None if it has neither, or both elsewhere."""
    if _YES_OR_NO.search(text):
        return None
    first_word = _FIRST_WORD.match(text)
    words = {first_word["word"].lower()} if first_word else {word.lower() for word in _YES_NO.findall(text)}
    if len(words) != 1:
        return None
    return "yes" if "yes" in words else "no"
