"""Extracts the final answer of a response and compares it with the ground truth.

These functions have no timeout: `math_verify` may compute forever on an answer such as `9^{9^{9^9}}`. Training calls
them in the worker processes of `cepo.rewards.pool`, which are killed after a time limit.
"""

from __future__ import annotations

import logging
import math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any
from zlib import crc32

from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingTypeStubs]
from sympy import Expr  # pyright: ignore[reportMissingTypeStubs]

from cepo.rewards.magnitude import is_too_costly

_MAX_CHARACTERS = 512
ROUNDING_LIMIT = 0.05
"""The largest relative difference between a number and its rounding."""


def extract_answer(response: str) -> str | None:
    r"""Returns the text of the last `\boxed{...}` with matching braces, else of the last `<answer>` tag, else None.

    Of nested boxes the outermost counts. If the last answer is blank, the result is None, never the string "None".
    """
    start, stop = _last_boxed_span(response) or _last_tagged_span(response) or (0, 0)
    return response[start:stop].strip() or None


def normalise_answer(text: str) -> str:
    r"""Returns a normalised spelling of an answer: `x = 60^\circ` and `60 \text{ cm}^2` both become `60`.

    Drops degree signs, units after a number, a name before `=`, outer `$` and boxes, a trailing period, thousands
    separators and spaces; unwraps `\text{}`; writes `\dfrac` as `\frac` and `\sqrt 2` as `\sqrt{2}`. It computes no
    values: `\frac{6}{4}` is unchanged. It is idempotent.
    """
    previous, current = None, text.translate(_CHARACTERS)
    while current != previous:
        previous = current
        current = _one_spelling(current)
    return current


def answers_equal(prediction: str, ground_truth: str) -> bool:
    r"""Returns whether both texts state the same answer.

    Answers with equal normalised spellings are equal. Otherwise a numeric gold answer is compared with a numeric
    prediction: plain decimals exactly, anything else by `math_verify`. Both sides are put in `\boxed{}`, because a bare
    `5 \sqrt { 3 }` would be read as 3. A prediction that is not a single number (an equation, a set, words) never
    equals a numeric gold answer. A gold answer in words (`\angle 1 \cong \angle 4`) or an equation is compared by
    spelling only; other algebra is compared by `math_verify`.

    A percentage equals its fraction: `60\%`, `0.6` and `\frac{3}{5}` are equal. The prediction `60` also equals a gold
    `60\%`, because the question may name the unit, but `60\%` does not equal a gold `60`.

    A prediction `A \approx B` is right if A or B is, provided that A and B differ by at most 1 %. Texts of more than
    512 characters are compared without normalisation.
    """
    if max(len(prediction), len(ground_truth)) > _MAX_CHARACTERS:
        return prediction.strip() == ground_truth.strip() != ""
    predicted, gold = normalise_answer(prediction), normalise_answer(ground_truth)
    if not predicted or not gold:
        return False
    if predicted == gold:
        return True
    if _is_numeric(gold):
        values = _stated_values(predicted)
        if any(_numbers_equal(value, gold) for value in values):
            return True
        return gold.endswith("%") and any("%" not in value and _numbers_equal(value, gold[:-1]) for value in values)
    if _WORDS.search(gold):
        return predicted.casefold() == gold.casefold()
    return _verified(predicted, gold)


def states_the_same(prediction: str, ground_truth: str) -> bool:
    r"""Returns whether a text states the right answer or a rounding of it, or the reverse: `8.7` for `5 \sqrt { 3 }`.

    This is looser than `answers_equal`, which decides the reward. It is used to choose wrong answers for teachers.
    """
    return answers_equal(prediction, ground_truth) or is_rounding(prediction, ground_truth)


def is_rounding(first: str, second: str) -> bool:
    """Returns whether one of two numbers is a decimal obtained by rounding or truncating the other to its places.

    Numbers that differ by more than 5 % are not roundings of each other, so 0 is not a rounding of 0.4. Neither are two
    different integers.
    """
    if max(len(first), len(second)) > _MAX_CHARACTERS:
        return False
    spelled = [normalise_answer(text) for text in (first, second)]
    if not all(map(_is_numeric, spelled)) or not _near(*map(_ratio_as_fraction, spelled), relative=ROUNDING_LIMIT):
        return False
    values = [decimal_value(text) for text in spelled]
    for number, text in enumerate(spelled):
        rounded, exact = values[number], values[1 - number]
        if rounded is None or exact is None or not _PLAIN_DECIMAL.fullmatch(text):
            continue
        unit = 10.0 ** -len(text.partition(".")[2])
        lost = abs(exact) - abs(rounded)
        if abs(lost) <= 0.5 * unit * (1 + 1e-9) or 0 <= lost < unit * (1 - 1e-9):
            return True
    return False


def is_numeric_answer(text: str) -> bool:
    r"""Returns whether a text states one number, such as `60^\circ`, `2:3` or `5 \sqrt { 3 }`."""
    return len(text) <= _MAX_CHARACTERS and _is_numeric(normalise_answer(text))


def value_key(answer: str) -> str:
    r"""Returns a key that is equal for answers of equal value, such as `1/2`, `0.5` and `50\%`.

    Numbers are compared to 12 significant digits, other answers by their spelling.
    """
    value = decimal_value(answer)
    if value is not None:
        return f"{value + 0.0:.12g}"
    return normalise_answer(answer).casefold() if len(answer) <= _MAX_CHARACTERS else answer.strip()


def decimal_value(text: str) -> float | None:
    r"""Returns the value of a text that states one number (B for `A \\approx B`), or None for anything else."""
    if len(text) > _MAX_CHARACTERS:
        return None
    values = _stated_values(normalise_answer(text))
    return _decimal_value(_ratio_as_fraction(values[-1])) if values else None


_CHARACTERS = str.maketrans(
    {
        "°": "", "º": "", "˚": "", "−": "-", "–": "-", "—": "-", "π": r"\pi ", "∠": r"\angle ", "≅": r"\cong ",
        "≈": r"\approx ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∶": ":", "²": "^2",
        "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ",
    }
)  # fmt: skip

_ANSWER_TAGS = re.compile(r"</?answer>", re.IGNORECASE)
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_UNIT = (
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?"
    r"(?:degrees?|deg\.?|(?:milli|centi|kilo)?met(?:er|re)s?|inch(?:es)?|foot|feet|yards?|miles?|units?"
    r"|mm|cm|km|in\.?|ft\.?|yd\.?|mi\.?|m)"
    r"(?:\s*(?:squared|cubed|\^\s*\{?\s*[23]\s*\}?))?"
)
_TRAILING_UNIT = re.compile(r"^(?P<value>.*?[\d})\]. ]|.*\\pi)\s*" + _UNIT + r"\s*\.?$", re.DOTALL)
_DEGREES = re.compile(
    r"\^\s*(?:\\circ|\{\s*(?:\\[,;:! ]\s*)?\\circ\s*\}|\{\s*o\s*\}|o(?![A-Za-z]))|\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z])"
)
_SPACES = re.compile(r"\\[,;:! ]|\\(?:quad|qquad|thinspace|displaystyle|left|right|limits)(?![A-Za-z])|~")
_TEXT = re.compile(
    r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mathsf|operatorname|mbox|hbox)"
    r"\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_TRAILING_PUNCTUATION = re.compile(r"(?:\\[,;:!]|[.,;\s])+\Z")
_NUMERIC = re.compile(r"(?:[\d.+\-*/^(){}\[\]:]|\\(?:frac|sqrt|pi|times|cdot|div)(?![A-Za-z]))+")
_PERCENTAGE = re.compile(r"(-?[^-+:%]+)%")
_PLAIN_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_NOT_IN_A_NAME = re.compile(
    r"[+\-*/^<>,:;]|\\(?:frac|sqrt|pi|times|cdot|div|approx|pm|neq|leq?|geq?|lt|gt)(?![A-Za-z])"
)
_SEVERAL = re.compile(r";|,(?!\d{3})|(?<![\\A-Za-z])(?:or|and)")  # spaces may have been removed
_WORDS = re.compile(r"\\(?:cong|angle|sim|parallel|perp|triangle)(?![A-Za-z])|=|(?<![\\A-Za-z])[A-Za-z]{3,}")


for _name in ("math_verify.parser", "math_verify.grader"):  # each call warns that its timeout is disabled
    logging.getLogger(_name).setLevel(logging.ERROR)


def _last_boxed_span(text: str) -> tuple[int, int] | None:
    """Returns the span of the content of the box that closes last: the last one, or the outermost of nested ones.

    It makes a single pass, because a degenerate response may open thousands of boxes. Escaped braces do not count.
    """
    last: tuple[int, int] | None = None
    opened: list[int | None] = []
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and not token[0].startswith(r"\{"):
            opened.append(token.end() if token[0].startswith("\\") else None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = (start, token.start())
    return last


def _last_tagged_span(text: str) -> tuple[int, int] | None:
    """Returns the span of the last closed `<answer>` in one pass, because a response may open thousands of them."""
    last, start = None, None
    for tag in _ANSWER_TAGS.finditer(text):
        if tag[0][1] != "/":
            start = tag.end() if start is None else start
        elif start is not None:
            last, start = (start, tag.start()), None
    return last


def _one_spelling(text: str) -> str:
    text = _without_wrappers(text)
    text = _DEGREES.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"√\s*(\d+|[({][^(){}]*[)}])?", lambda match: r"\sqrt{" + (match[1] or "").strip("(){}") + "}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"(?<=\d)\s*\{\s*\}", "", text)
    text = re.sub(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)", ",", text)
    text = _SPACES.sub(" ", text).replace(r"\%", "%")
    text = _value_of_equation(text)
    return _without_spaces(text)


def _without_wrappers(text: str) -> str:
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")):
        is_wrapped = text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing)
        if is_wrapped and opening not in text[len(opening) : -len(closing)]:
            return text[len(opening) : -len(closing)].strip()
    group = re.match(r"(?:\\boxed\s*)?(?=\{)", text)
    boxed = r"\boxed" + text[group.end() :] if group else ""
    if _last_boxed_span(boxed) == (len(r"\boxed{"), len(boxed) - 1):
        return boxed[len(r"\boxed{") : -1].strip()
    return _TRAILING_PUNCTUATION.sub("", text)


def _value_of_equation(text: str) -> str:
    r"""`m\\angle A = 2 \\cdot 30 = 60` -> `60`, `60 = x` -> `60`; `2x = 60` and several statements are unchanged."""
    parts = [_without_unit(part) for part in text.split("=")]
    if any(map(_SEVERAL.search, parts[1:-1])):
        return text
    if len(parts) > 1 and _states_a_value(parts[-1]) and (_is_name(parts[0]) or all(map(_states_a_value, parts))):
        return _without_approximate_name(parts[-1])
    if len(parts) == 2 and _states_a_value(parts[0]) and _is_name(parts[1]):
        return parts[0]
    return _without_approximate_name("=".join(parts))


def _without_approximate_name(text: str) -> str:
    parts = [_without_unit(part) for part in re.split(r"\\approx(?![A-Za-z])", text)]
    if len(parts) > 1 and (not parts[0].strip() or _is_name(parts[0])):
        parts = parts[1:]
    return r"\approx ".join(parts)


def _states_a_value(text: str) -> bool:
    parts = re.split(r"\\approx(?![A-Za-z])", text)
    return all(_is_numeric(_without_spaces(_without_unit(part))) for part in parts)


def _is_name(text: str) -> bool:
    r"""Returns whether a text has a letter and no arithmetic: a variable, a segment, `m\angle A`, a word."""
    text = text.strip()
    return bool(re.search("[A-Za-z]", text)) and not text[0].isdigit() and not _NOT_IN_A_NAME.search(text)


def _without_unit(text: str) -> str:
    match = _TRAILING_UNIT.match(text.strip())
    if match and _is_numeric(_without_spaces(match["value"])):
        return match["value"].strip()
    return text


def _without_spaces(text: str) -> str:
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text.strip())
    text = re.sub(r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s+(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)", "\0", text)
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", text)
    text = re.sub(r"\s+", "", text).replace("\0", " ")
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return text.removeprefix("+")


def _is_numeric(text: str) -> bool:
    percentage = _PERCENTAGE.fullmatch(text)
    text = percentage[1] if percentage else text
    return bool(_NUMERIC.fullmatch(text)) and bool(re.search(r"\d|\\pi", text))


def _stated_values(text: str) -> list[str]:
    r"""Returns the numeric values of a prediction: one, or both sides of `A \approx B` if they are near; else none."""
    parts = [part.strip() for part in re.split(r"\\approx(?![A-Za-z])", text)]
    if not all(map(_is_numeric, parts)) or len(parts) > 2:
        return []
    if len(parts) == 2 and not _near(parts[0], parts[1], relative=0.01):
        return []
    return parts


def _numbers_equal(prediction: str, gold: str) -> bool:
    if _PLAIN_DECIMAL.fullmatch(prediction) and _PLAIN_DECIMAL.fullmatch(gold):
        return Decimal(prediction) == Decimal(gold)
    prediction, gold = _ratio_as_fraction(prediction), _ratio_as_fraction(gold)
    # simplify() needs tens of milliseconds to find that two radicals differ; comparing decimals is fast.
    return _near(prediction, gold, relative=1e-4) and _verified(prediction, gold)


def _ratio_as_fraction(text: str) -> str:
    """`2:3` -> `\\frac{2}{3}`, `60%` -> `\\frac{60}{100}`; anything else is unchanged."""
    parts = [text[:-1], "100"] if text.endswith("%") else text.split(":")
    return rf"\frac{{{parts[0]}}}{{{parts[1]}}}" if len(parts) == 2 else text


def _near(first: str, second: str, *, relative: float) -> bool:
    values = [value for text in (first, second) if (value := _decimal_value(text)) is not None]
    return len(values) == 2 and abs(values[0] - values[1]) <= relative * max(map(abs, values))


def _decimal_value(text: str) -> float | None:
    parsed = _parsed(text)
    try:
        value = float(parsed[0].evalf(15)) if parsed else math.nan
        return value if math.isfinite(value) else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        # Not a single real number: a set, a string that did not parse, a complex or an infinite value.
        return None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    if is_too_costly(text) or ":" in text:  # `math_verify` reads `60:1:1` as 60; a ratio of two is a fraction by now
        return []
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _verified(prediction: str, gold: str) -> bool:
    values = [_value_at_a_point(text) for text in (prediction, gold)]
    # simplify() may take minutes to find that two expressions differ; their values at one point are fast to compare.
    known = [value for value in values if value is not None]
    if len(known) == 2 and abs(known[0] - known[1]) > 1e-4 * max(1.0, *map(abs, known)):
        return False
    return bool(verify(_parsed(gold), _parsed(prediction), timeout_seconds=None))


def _value_at_a_point(text: str) -> complex | None:
    """Returns an expression's value, with variables replaced by numbers that depend on their names, or None."""
    parsed = _parsed(text)
    if not parsed or not isinstance(parsed[0], Expr):
        return None
    expression: Any = parsed[0]  # sympy's annotations do not allow documented calls
    point = {symbol: 0.5 + crc32(str(symbol).encode()) % 1009 / 1009 for symbol in expression.free_symbols}
    try:
        return complex(expression.subs(point).evalf(15))
    except (AttributeError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
