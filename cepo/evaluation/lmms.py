"""Holds lmms-eval's protocol: the task of each benchmark, its prompt and its limit of tokens, and the log of responses.

The log has one record for each row of the data set, as `python3 -m lmms_eval --model from_log` reads it (lmms-eval
75571cf, lmms_eval/models/simple/from_log.py): `doc_id`, the row's number; `doc`; `target`; `resps`, a list of one list of
responses, of which the first is scored; and `filtered_resps`.

Source: lmms-eval at 75571cf (2026-08-06), lmms_eval/tasks/*/reasoning, whose prompts are facts of the protocol and are
therefore given word for word. Adopted from lmms-eval, https://github.com/EvolvingLMMs-Lab/lmms-eval. The original
copyright: Copyright (c) 2025 LMMs-Lab, licensed under the Apache License, Version 2.0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.answers import LETTERS
from cepo.errors import DataError
from cepo.evaluation.formats import listed, optional_text, text, whole_number
from cepo.evaluation.protocols import LMMS_LIMIT
from cepo.evaluation.statistics import Row
from cepo.files.trees import Fields, Tree
from cepo.models.text_codec import IMAGE_MARK
from cepo.run_folder.writing import write_atomically

SYSTEM_PROMPT = (
    "You are a helpful assistant. When the user asks a question, your response must include two parts: "
    "first, the reasoning process enclosed in <think>...</think> tags, "
    "then the final answer enclosed in <answer>...</answer> tags."
    "Please provide a clear, concise response within <answer> </answer> tags that directly addresses the question."
)
"""The system prompt of all `*_reasoning` tasks."""


@dataclass(frozen=True, kw_only=True)
class LmmsTask:
    """A task of lmms-eval; `prompt` returns the user's text of a row.

    In MMMU's and MMMU-Pro's, `<image 1>` stands for an image; a text without any mark follows the image.
    """

    name: str
    prompt: Callable[[Fields], str]
    has_system_prompt: bool = True
    max_new_tokens: int = LMMS_LIMIT


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
    is_choice = text(row, "question_type") == "multiple-choice"
    return _mmmu_pro(row) if is_choice else text(row, "question")


def _mmmu_pro(row: Fields) -> str:
    return f"{text(row, 'question')}\n{_lettered(listed(row, 'options'))}"


def _mmmu_pro_vision(row: Fields) -> str:
    prompt = f"{_lettered(listed(row, 'options'))}\n\nAnswer the question in the image."
    return f"{prompt}{IMAGE_MARK}{prompt}"  # as the task builds it, with the text on both sides


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


def _mathverse(row: Fields) -> str:
    return text(row, "query_wo")


LMMS_TASKS = {
    "dynamath": LmmsTask(name="dynamath_reasoning", prompt=_question),
    "hallusionbench": LmmsTask(
        name="hallusion_bench_image", prompt=_question, has_system_prompt=False, max_new_tokens=128
    ),
    "logicvista": LmmsTask(name="logicvista_reasoning", prompt=_question),
    "mathverse": LmmsTask(name="mathverse_testmini_reasoning", prompt=_mathverse),
    "mathvision": LmmsTask(name="mathvision_reason_testmini_reasoning", prompt=_mathvision),
    "mathvista": LmmsTask(name="mathvista_testmini_cot_reasoning", prompt=_mathvista),
    "mmmu": LmmsTask(name="mmmu_val_reasoning", prompt=_mmmu),
    "mmmu_pro": LmmsTask(name="mmmu_pro_standard_cot_reasoning", prompt=_mmmu_pro),
    "mmmu_pro_vision": LmmsTask(name="mmmu_pro_vision_cot_reasoning", prompt=_mmmu_pro_vision),
    "wemath": LmmsTask(name="wemath_testmini_reasoning", prompt=_wemath),
}
"""The task of each benchmark."""


def write_log(folder: Path, log: Tree) -> None:
    """Writes an `exported_log` into a new folder, under the name of its task."""
    folder.mkdir(parents=True)
    path = folder / f"{log['model_configs']['task']}.json"
    write_atomically(path, json.dumps(log, indent=1, ensure_ascii=False) + "\n")


def exported_log(benchmark: str, rows: Sequence[Row], *, num_rows: int, model: str) -> Tree:
    """Returns the log of responses to a benchmark whose source has `num_rows` rows.

    lmms-eval asks for a response to every row of its data set, so a row that was left out has an empty one.
    """
    by_problem: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_problem[int(row["problem_id"])].append(row)
    return {
        "args": {"model": model, "model_args": "", "limit": None},
        "model_configs": {"task": LMMS_TASKS[benchmark].name},
        "logs": [_record(number, by_problem[number]) for number in range(num_rows)],
    }


def _record(number: int, rows: Sequence[Row]) -> Tree:
    responses = [row["response"] for row in rows] or [""]
    return {
        "doc_id": number,
        "doc": {"problem": rows[0]["problem"]} if rows else {},
        "target": rows[0]["ground_truth"] if rows else "",
        "resps": [responses],
        "filtered_resps": [responses[0]],
    }
