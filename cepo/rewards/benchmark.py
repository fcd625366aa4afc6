"""Rewards answers to benchmark questions: multiple choice, numbers with a tolerance, and other text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from cepo.rewards.answers import answers_equal, decimal_value, extract_answer, is_numeric_answer, normalise_answer
from cepo.rewards.choices import LETTERS, chosen_letters, spelled_alike
from cepo.trees import Fields

REWARD_NAME = "benchmark"
REWARD_TYPE = "batch"

AnswerKind = Literal["choice", "numeric", "text"]
KINDS: tuple[AnswerKind, ...] = ("choice", "numeric", "text")

_OPTIONS_IN_TEXT = re.compile(r"\(([A-J])\)\s*(.*?)(?=[\s,;]*\([A-J]\)|\s*$)", re.DOTALL)
_STATEMENT = re.compile(r"\banswer\b[\s*_]*(?:is|:|=)[\s*_:]*(?P<answer>[^\n]+)", re.IGNORECASE)
_TUPLE = re.compile(r"\((?P<parts>[^()]+(?:,[^()]+)+)\)")


def compute_score(reward_inputs: Sequence[Fields]) -> list[dict[str, float]]:
    """Scores a batch: `overall = accuracy` is 1 if the answer from `read_answer` is right, `format` 1 if there is one.

    Reads these columns of a row: `answer_kind` (choice, numeric or text; if missing, from `kind_of`), `choices` (the
    options' texts in order) and `tolerance` (absolute, for numbers; 0 if missing).
    """
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        gold = reward_input["ground_truth"]
        kind = reward_input.get("answer_kind") or kind_of(gold)
        choices = reward_input.get("choices") or ()
        answer = read_answer(reward_input["response"], kind, choices)
        accuracy = float(
            answer is not None and is_right(answer, gold, kind, choices, reward_input.get("tolerance") or 0.0)
        )
        scores.append({"overall": accuracy, "accuracy": accuracy, "format": float(answer is not None)})
    return scores


def kind_of(ground_truth: str) -> AnswerKind:
    """Returns `choice` for one or more letters from A to J, `numeric` for one number, else `text`."""
    if re.fullmatch(r"\s*[A-J](?:\s*,\s*[A-J])*\s*", ground_truth):
        return "choice"
    return "numeric" if is_numeric_answer(ground_truth) else "text"


def read_answer(response: str, kind: AnswerKind, choices: Sequence[str] = ()) -> str | None:
    r"""Returns the final answer of a response, or None if there is none.

    The last `\boxed{}` or `<answer>` counts (`extract_answer`). Without either, the last statement `answer is ...` or
    `Answer: ...` counts. Otherwise the last line counts if it is only a letter with or without its option, or only a
    number. The answer is never guessed.
    """
    answer = extract_answer(response)
    if answer is not None:
        return answer
    stated = [match["answer"].strip() for match in _STATEMENT.finditer(response)]
    if stated and stated[-1].strip(" .*_"):
        return stated[-1]
    last_line = next((line.strip() for line in reversed(response.splitlines()) if line.strip()), "")
    alone = kind == "choice" and chosen_letters(last_line, choices)
    return last_line if alone or (kind == "numeric" and is_numeric_answer(last_line)) else None


def is_right(answer: str, gold: str, kind: AnswerKind, choices: Sequence[str] = (), tolerance: float = 0.0) -> bool:
    """Returns whether `answer` states `gold`: the same letters, a number within `tolerance`, or equal text in any case.

    A tuple of numbers, such as a point, is right if each of its numbers is.
    """
    if kind == "choice":
        wanted = chosen_letters(gold, choices)
        return bool(wanted) and chosen_letters(answer, choices) == wanted
    if kind == "text" and not answers_equal(answer, gold):
        parts, wanted_parts = _parts(answer), _parts(gold)
        if parts and len(parts) == len(wanted_parts):
            pairs = zip(parts, wanted_parts, strict=True)
            return all(_number_is_right(part, wanted_part, tolerance) for part, wanted_part in pairs)
        return spelled_alike(answer, gold)
    return _number_is_right(answer, gold, tolerance)


def _number_is_right(answer: str, gold: str, tolerance: float) -> bool:
    if answers_equal(answer, gold):
        return True
    value, wanted = decimal_value(answer), decimal_value(gold)
    # The factor allows for values such as 2.094 that are not exact in binary.
    return value is not None and wanted is not None and abs(value - wanted) <= tolerance * (1 + 1e-9)


def _parts(text: str) -> list[str]:
    found = _TUPLE.fullmatch(normalise_answer(text))
    return found["parts"].split(",") if found else []


def options_in_text(question: str) -> list[str]:
    """Returns the options that a question lists as `(A) red (B) blue`; empty unless they start at A without a gap."""
    found = _OPTIONS_IN_TEXT.findall(question)
    letters = "".join(letter for letter, _ in found)
    if len(found) < 2 or letters != LETTERS[: len(found)]:
        return []
    return [text.strip() for _, text in found]
