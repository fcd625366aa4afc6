"""A chat template's default system turn is in every context, and a response keeps its tokens behind each of them.

TRL's trainers, fine-tuning included, and vLLM's chat interface tokenise a conversation by the tokenizer's own
`apply_chat_template`.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_checkpoints.smollm import write_smollm_like

from cepo.algorithms.settings import TeacherConfig
from cepo.data.prompts import ContextBuilder, Problem
from cepo.models.interface import Turn
from cepo.models.processing import Processing
from cepo.types import TextReference

QUESTION = "What is 3 + 4?"


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return Processing(str(write_smollm_like(tmp_path_factory.mktemp("smollm") / "model")))


def conversation(processing: Processing, *turns: tuple[str, str], generate: bool = True) -> list[int]:
    messages = [{"role": role, "content": text} for role, text in turns]
    tokenizer: Any = processing.tokenizer
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)


def problem(text: str) -> Problem:
    return Problem(prompt_id="0", text=text, images=(), ground_truth="7", solution=None, columns={})


@pytest.mark.parametrize("reference", ["7", "3 + 4 = 7.", "- 7\n\n", "é 你好"])
@pytest.mark.parametrize("question", [QUESTION, f"{QUESTION} ", f"\n{QUESTION}\n\n", "é 你好"])
def test_student_and_teacher_read_the_default_system_turn(
    question: str, reference: str, processing: Processing
) -> None:
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=500)
    student = contexts.student(problem(question))
    assert list(student.token_ids) == list(student.engine_ids) == conversation(processing, ("user", question))
    text = contexts.reference_text(TextReference(text=reference))
    teacher = contexts.teacher(problem(question), student, text)
    hinted = f"{question}\nHere is a sample answer: {text}"
    assert list(teacher.token_ids) == conversation(processing, ("user", hinted))
    assert "You are a helpful assistant" in processing.decode(teacher.token_ids)


def test_a_system_turn_of_the_data_replaces_the_default(processing: Processing) -> None:
    context = processing.encode(QUESTION, None, history=[Turn("system", "Be brief.")])
    assert list(context.token_ids) == conversation(processing, ("system", "Be brief."), ("user", QUESTION))
    assert "You are a helpful assistant" not in processing.decode(context.token_ids)


@pytest.mark.parametrize("response", ["7", "3 + 4 = 7.", " 7", "é 你好"])
def test_a_response_has_the_tokens_of_a_fine_tuned_turn(response: str, processing: Processing) -> None:
    """Sampled tokens and an end token continue the prompt as fine-tuning's whole conversation does."""
    context = processing.encode(QUESTION, None)
    sampled = [*processing.encode_text(response), processing.eos_token_ids[0]]
    whole = conversation(processing, ("user", QUESTION), ("assistant", response), generate=False)
    expected = [*context.token_ids, *sampled]
    assert whole[: len(expected)] == expected
