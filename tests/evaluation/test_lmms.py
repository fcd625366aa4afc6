"""lmms-eval's protocol: prompts as its tasks build them."""

from __future__ import annotations

import pytest
from benchmark_rows import MATHVISTA, ROWS

from cepo.errors import DataError
from cepo.evaluation.benchmark_names import TITLES
from cepo.evaluation.benchmarks import BENCHMARKS, converted
from cepo.evaluation.lmms import PROMPTS, SYSTEM_PROMPT

BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}
ASKED = {
    "dynamath": "<image>How long is AB?",
    "logicvista": "<image>Next? (A) up (B) down",
    "mathvision": '<image>Please solve the problem step by step and put your answer in one "\\boxed{}".'
    "Which picture? <image1>\nChoices: A. A\nB. B\nC. C\nD. D\nE. E",
    "mathvista": "<image>Question: How far?\nHint: Please answer the question requiring a floating-point number with one "
    "decimal place and provide the final value, e.g., 1.2, 1.3, 1.4, at the end.",
    "mmmu": "Which of<image>?\nA. leaf\nB. root",
    "wemath": "<image>How long?\nA. 3; B. 4;C. 5; D. No correct answer",
}


@pytest.mark.parametrize("name", sorted(TITLES))
def test_prompts_are_those_of_lmms_evals_tasks(name: str) -> None:
    rows = [ROWS[name]]
    (problem,) = converted(rows, BY_NAME[name], "f", skip_bad_rows=False, is_lmms=True)
    *system, user = problem["problem"]
    assert user == {"role": "user", "content": ASKED[name]}
    assert system == [{"role": "system", "content": SYSTEM_PROMPT}]
    assert problem["answer"] == converted(rows, BY_NAME[name], "f", skip_bad_rows=False)[0]["answer"]


def test_mathvistas_prompt_lists_choices_and_units() -> None:
    """An answer of 3 decimals has no prompt there."""
    prompt = PROMPTS["mathvista"]
    choice = MATHVISTA | {
        "question_type": "multi_choice",
        "answer_type": "text",
        "choices": ["6cm", "7cm"],
        "unit": "cm",
    }
    assert prompt(choice) == (
        "Question: How far? (Unit: cm)\nChoices:\n(A) 6cm\n(B) 7cm\n"
        "Hint: Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end."
    )
    with pytest.raises(DataError, match="no prompt for an answer of type float 3"):
        prompt(MATHVISTA | {"precision": 3})
