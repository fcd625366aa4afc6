"""lmms-eval's protocol: prompts as its tasks build them, and responses in the form that it scores again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import MATHVISTA, ROWS
from evaluation_folders import graded

from cepo.errors import DataError
from cepo.evaluation.benchmark_names import TITLES
from cepo.evaluation.benchmarks import BENCHMARKS, converted
from cepo.evaluation.lmms import LMMS_TASKS, SYSTEM_PROMPT, exported_log

BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}
WORKS = [f"{'ABCDEFGHIJ'[n]}. work {n}" for n in range(10)]
PROMPTS = {
    "dynamath": "<image>How long is AB?",
    "hallusionbench": "<image>Are the lines parallel?",
    "logicvista": "<image>Next? (A) up (B) down",
    "mathverse": "<image>Answer directly.\nQuestion: Find the angle.",
    "mathvision": '<image>Please solve the problem step by step and put your answer in one "\\boxed{}".'
    "Which picture? <image1>\nChoices: A. A\nB. B\nC. C\nD. D\nE. E",
    "mathvista": "<image>Question: How far?\nHint: Please answer the question requiring a floating-point number with one "
    "decimal place and provide the final value, e.g., 1.2, 1.3, 1.4, at the end.",
    "mmmu": "Which of<image>?\nA. leaf\nB. root",
    "mmmu_pro": "What shows<image>?\n" + "\n".join(f"{'ABCDEFGHIJ'[n]}. event {n}" for n in range(10)),
    "mmmu_pro_vision": "<image>".join(2 * ["\n".join(WORKS) + "\n\nAnswer the question in the image."]),
    "wemath": "<image>How long?\nA. 3; B. 4;C. 5; D. No correct answer",
}


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_prompts_are_those_of_lmms_evals_tasks(name: str) -> None:
    rows = [ROWS[name]]
    (problem,) = converted(rows, BY_NAME[name], "f", skip_bad_rows=False, is_lmms=True)
    *system, user = problem["problem"]
    assert user == {"role": "user", "content": PROMPTS[name]}
    assert system == ([{"role": "system", "content": SYSTEM_PROMPT}] if name != "hallusionbench" else [])
    assert problem["answer"] == converted(rows, BY_NAME[name], "f", skip_bad_rows=False)[0]["answer"]


def test_mathvistas_prompt_lists_choices_and_units() -> None:
    """An answer of 3 decimals has no prompt there."""
    prompt = LMMS_TASKS["mathvista"].prompt
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


def test_each_benchmark_has_a_task_of_its_own() -> None:
    assert sorted(LMMS_TASKS) == sorted(TITLES)
    assert len({task.name for task in LMMS_TASKS.values()}) == len(LMMS_TASKS)


class FromLog:
    """Reads a log as lmms-eval's model `from_log` does: the first response of each `doc_id` of a task."""

    def __init__(self, file: Path) -> None:
        log: dict[str, Any] = json.loads(file.read_text("utf-8"))
        assert log["args"]["limit"] is None
        self.task = log["model_configs"]["task"]
        self.responses = {record["doc_id"]: record["resps"][0] for record in log["logs"]}

    def generate(self, doc_id: int) -> str:
        return self.responses[doc_id][0]


def test_an_export_has_a_response_to_every_row(tmp_path: Path) -> None:
    """Of 3 rows, the second was left out; the third has 2 responses, of which the first is scored."""
    rows = [graded(0, True), graded(2, True), graded(2, False, response="other")]
    log = exported_log("wemath", rows, num_rows=3, model="org/model")
    file = tmp_path / "log.json"
    file.write_text(json.dumps(log))
    read = FromLog(file)
    assert read.task == "wemath_testmini_reasoning"
    assert [read.generate(number) for number in range(3)] == [r"\boxed{1}", "", r"\boxed{1}"]
    assert log["logs"][2]["resps"] == [[r"\boxed{1}", "other"]]
    assert log["logs"][2]["filtered_resps"] == [r"\boxed{1}"]
    assert log["logs"][2]["target"] == "1"
