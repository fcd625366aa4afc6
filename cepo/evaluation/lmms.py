"""Holds the prompts of lmms-eval's protocol: what its reasoning task asks about a row of each benchmark.

Source: lmms-eval at 75571cf (2026-08-06), lmms_eval/tasks/*/reasoning, whose prompts are facts of the protocol and are
therefore given word for word. Adopted from lmms-eval, https://github.com/EvolvingLMMs-Lab/lmms-eval. The original
copyright: Copyright (c) 2025 LMMs-Lab, licensed under the Apache License, Version 2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cepo.answers import LETTERS
from cepo.errors import DataError
from cepo.evaluation.formats import listed, optional_text, text, whole_number
from cepo.files.trees import Fields

SYSTEM_PROMPT = (
    "You are a helpful assistant. When the user asks a question, your response must include two parts: "
    "first, the reasoning process enclosed in <think>...</think> tags, "
    "then the final answer enclosed in <answer>...</answer> tags."
    "Please provide a clear, concise response within <answer> </answer> tags that directly addresses the question."
)
"""The system prompt of all these tasks."""


def _question(row: Fields) -> str:
    return text(row, "question")


def _lettered(options: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def _wemath(row: Fields) -> str:
    return f"{text(row, 'question')}\n{text(row, 'option')}"


def _mathvision(row: Fields) -> str:
    prompt = f'Please solve the problem step by step and put your answer in one "\\boxed{{}}".{text(row, "question")}'
    options = _lettered(listed(row, "options"))
    return f"{prompt}\nChoices: {options}" if options else prompt


def _mmmu(row: Fields) -> str:
    question = text(row, "question")
    is_choice = text(row, "question_type") == "multiple-choice"
    return f"{question}\n{_lettered(listed(row, 'options'))}" if is_choice else question


_MATHVISTA_HINTS = {
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3, at the end.",
    "float 1": (
        "requiring a floating-point number with one decimal place and provide the final value, "
        "e.g., 1.2, 1.3, 1.4, at the end."
    ),
    "float 2": (
        "requiring a floating-point number with two decimal places and provide the final value, "
        "e.g., 1.23, 1.34, 1.45, at the end."
    ),
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end.",
    "choice": "and provide the correct option letter, e.g., A, B, C, D, at the end.",
}


def _mathvista(row: Fields) -> str:
    kind = text(row, "answer_type")
    if kind == "float":
        kind = f"float {whole_number(row, 'precision')}"
    if text(row, "question_type") == "multi_choice":
        kind = "choice"
    if kind not in _MATHVISTA_HINTS:
        raise DataError(f"lmms-eval has no prompt for an answer of type {kind}")
    question = f"Question: {text(row, 'question')}"
    unit = optional_text(row, "unit")
    if unit:
        question += f" (Unit: {unit})"
    lines = [question]
    choices = listed(row, "choices")
    if choices:
        lines.append("Choices:")
        lines += [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([*lines, f"Hint: Please answer the question {_MATHVISTA_HINTS[kind]}"])


PROMPTS: Mapping[str, Callable[[Fields], str]] = {
    "dynamath": _question,
    "logicvista": _question,
    "mathvision": _mathvision,
    "mathvista": _mathvista,
    "mmmu": _mmmu,
    "wemath": _wemath,
}
"""By benchmark the user's text of a row. In MMMU's `<image 1>` stands for an image; a text without any mark follows it."""
