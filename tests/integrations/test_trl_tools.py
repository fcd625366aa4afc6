"""cepo's methods in TRL's own tool loop: TRL parses and runs the calls of a model that follows a script."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText

from cepo.algorithms import build_estimator
from cepo.errors import DataError
from cepo.integrations.adapter import Hint, Row
from cepo.microgeo.world import ASSETS, SHAPES
from cepo.types import TokenBatch

pytest.importorskip("trl", reason="the extra `trl` is not installed")
from testing.tool_loop import TURNS, call, output_of_training, trainer_with_tools

pytestmark = pytest.mark.heavy

PROBLEM = SHAPES.generate(0, 0, stream="train")
QUESTION = r"Each side is 3. What is the perimeter? Answer in \boxed{}."
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])
"""The answers of the four responses are 18, 9, 3 and 18."""
RESULTS = (("18",), ("9",), (), ("6", "18"))
"""What the tool returned in each response: 6 * 3, 3 * 3, nothing, and 2 * 3 and then 6 * 3."""


def recorded_multiply(calls: list[tuple[int, int]]) -> Any:
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.append((a, b))
        return a * b

    return multiply


class Desk:
    """An environment whose method is a tool."""

    def reset(self, **_: Any) -> None:
        self.number_of_calls = 0

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.number_of_calls += 1
        return a * b


def zoom(part: str) -> list[dict[str, Any]]:
    """Shows a part of the image.

    Args:
        part: Which part.
    """
    return [{"type": "image", "image": Image.new("RGB", (64, 64), "red")}, {"type": "text", "text": part}]


class Step(NamedTuple):
    """One step of a trainer, and what its credit was computed from."""

    trainer: Any
    model: Any  # before the update
    multiply: Any
    calls: list[tuple[int, int]]
    output: dict[str, Any]
    hints: dict[str, list[Hint | None]]  # by view
    student: Tensor  # log-probs (B, T)
    teachers: dict[str, Tensor]  # by view (B, T)


@pytest.fixture(scope="module", params=["cepo", "hindsight", "visual"])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Step:
    calls: list[tuple[int, int]] = []
    multiply = recorded_multiply(calls)
    folder = str(tmp_path_factory.mktemp("tools"))
    trainer: Any = trainer_with_tools(folder, TURNS, tools=[multiply], method=request.param)
    model = AutoModelForImageTextToText.from_pretrained(
        ASSETS, dtype="float32"
    ).eval()  # not a copy: TRL patches its own
    scored = trainer._scored
    seen: list[Any] = []

    def noted(output: Any, live: Tensor, hints: Any) -> Any:
        student, teachers = scored(output, live, hints)
        seen.append((hints, student, teachers))
        return student, teachers

    trainer._scored = noted
    output = output_of_training(trainer)
    hints, student, teachers = seen[0]
    return Step(trainer, model, multiply, calls, output, hints, student, teachers)


def response_by_hand(trainer: Any, row: int) -> tuple[list[int], list[int]]:
    """The tokens of a response and their marks: 1 for the model's turns, 0 for a tool's result."""
    tokenizer = trainer.processing_class.tokenizer
    ids: list[int] = []
    marks: list[int] = []
    for number, turn in enumerate(TURNS[row]):
        turn_ids = tokenizer(turn + "<|im_end|>")["input_ids"]
        ids += turn_ids
        marks += [1] * len(turn_ids)
        if number < len(RESULTS[row]):
            result = f"\n<|im_start|>user\n<tool_response>\n{RESULTS[row][number]}\n</tool_response><|im_end|>\n"
            result_ids = tokenizer(result + "<|im_start|>assistant\n")["input_ids"]
            ids += result_ids
            marks += [0] * len(result_ids)
    return ids, marks


def prompt_by_hand(step: Step, hint: Hint | None) -> dict[str, Any]:
    """The processor's fields of the prompt with the tool's description, its image, and a teacher's hint."""
    text = QUESTION
    if hint is not None and hint.text is not None:
        text = f"{QUESTION}\nHere is a sample answer: {hint.text}"
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    is_blind = hint is not None and hint.text is None
    if not is_blind:
        parts.insert(0, {"type": "image", "image": SHAPES.draw(PROBLEM)})
    return step.trainer.processing_class.apply_chat_template(
        [{"role": "user", "content": parts}],
        tools=[step.multiply],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


@torch.no_grad()
def log_probs_by_hand(step: Step, hint: Hint | None, response_ids: list[int]) -> Tensor:
    """The log-probs (T,) of a whole response, with the tool's results in it, after this prompt."""
    fields = dict(prompt_by_hand(step, hint))
    prompt_length = fields["input_ids"].shape[1]
    sequence = torch.cat([fields["input_ids"], torch.tensor([response_ids])], dim=1)
    visuals = {name: fields[name] for name in ("pixel_values", "image_grid_thw") if name in fields}
    if visuals:
        visuals["mm_token_type_ids"] = (sequence == step.model.config.image_token_id).long()
    output = step.model(input_ids=sequence, attention_mask=torch.ones_like(sequence), **visuals)
    log_probs = output.logits[0].float().log_softmax(dim=-1)
    positions = torch.arange(prompt_length, sequence.shape[1])
    return log_probs[positions - 1, sequence[0, positions]]


def test_trl_calls_the_tool_and_its_tokens_have_no_credit(step: Step) -> None:
    """The first three calls are those of the first turns, the fourth that of the fourth response's second turn."""
    assert step.calls == [(6, 3), (3, 3), (2, 3), (6, 3)]
    output = step.output
    for row in range(len(TURNS)):
        ids, marks = response_by_hand(step.trainer, row)
        length = len(ids)
        padded_length = len(output["tool_mask"][row])
        assert output["completion_ids"][row, :length].tolist() == ids
        assert output["completion_mask"][row].tolist() == [1] * length + [0] * (padded_length - length)
        assert output["tool_mask"][row, :length].tolist() == marks
        advantages = output["advantages"][row]
        is_models = torch.tensor(marks).bool()
        of_model = advantages[:length][is_models]
        of_tool = advantages[:length][~is_models]
        sign = 1 if REWARDS[row] else -1
        assert (of_model.sign() == sign).all()
        assert not of_tool.any()
        assert not advantages[length:].any()


def test_a_step_with_tools_updates_the_weights(step: Step) -> None:
    logged = step.trainer.state.log_history[0]
    assert logged["tools/call_frequency"] == 1.0
    assert logged["tools/failure_frequency"] == 0.0
    assert math.isfinite(logged["grad_norm"])
    assert logged["grad_norm"] > 0
    initial_weights = step.model.state_dict()
    trained_weights = step.trainer.model.state_dict()
    assert any(not torch.equal(initial_weights[name], weight) for name, weight in trained_weights.items())


def test_teachers_read_the_transcript_with_the_tools_results(step: Step) -> None:
    tokenizer = step.trainer.processing_class.tokenizer
    hints_of_views = {**step.hints, "student": [None] * len(TURNS)}
    log_probs_of_views = {**step.teachers, "student": step.student}
    for row in range(len(TURNS)):
        ids, marks = response_by_hand(step.trainer, row)
        for view, hints in hints_of_views.items():
            log_probs = log_probs_of_views[view][row, : len(ids)]
            expected = log_probs_by_hand(step, hints[row], ids)
            torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-4)
            if RESULTS[row]:
                without_result = [token for token, mark in zip(ids, marks, strict=True) if mark]
                last_turn = len(tokenizer(TURNS[row][-1])["input_ids"])
                unread = log_probs_by_hand(step, hints[row], without_result)
                is_same = torch.allclose(unread[-last_turn:], expected[-last_turn:], rtol=0, atol=1e-2)
                assert not is_same, "the result must matter"


def test_what_teachers_read_beside_the_transcript(step: Step) -> None:
    """The right answer, a wrong one of another response, or no image."""
    texts: dict[str, set[str | None]] = {}
    for view, hints in step.hints.items():
        texts[view] = {hint.text for hint in hints if hint is not None}
    accepted = {"correct": {"18"}, "wrong": {"9", "3"}, "blind": {None}}
    assert set(texts) == set(step.trainer.estimator.views)
    for view, texts_of_view in texts.items():
        assert texts_of_view
        assert texts_of_view <= accepted[view]


def test_credit_is_that_of_responses_without_the_tools_tokens(step: Step) -> None:
    """The method's advantages of the model's tokens alone, as if the tool's were not there, from log-probs by hand."""
    student: list[Tensor] = []
    teachers: dict[str, list[Tensor]] = {view: [] for view in step.hints}
    models_tokens: list[Tensor] = []
    for row in range(len(TURNS)):
        ids, marks = response_by_hand(step.trainer, row)
        is_models = torch.tensor(marks).bool()
        models_tokens.append(is_models)
        student.append(log_probs_by_hand(step, None, ids)[is_models])
        for view, hints in step.hints.items():
            teachers[view].append(log_probs_by_hand(step, hints[row], ids)[is_models])
    mask = pad_sequence([torch.ones(len(values)).bool() for values in student], batch_first=True)
    rewards = torch.zeros(mask.shape)
    for row, values in enumerate(student):
        rewards[row, len(values) - 1] = REWARDS[row]
    teacher_log_probs: dict[str, Tensor] = {}
    has_reference: dict[str, Tensor] = {}
    for view, hints in step.hints.items():
        teacher_log_probs[view] = pad_sequence(teachers[view], batch_first=True)
        has_reference[view] = torch.tensor([hint is not None for hint in hints])
    batch = TokenBatch(
        token_level_rewards=rewards,
        response_mask=mask,
        old_log_probs=pad_sequence(student, batch_first=True),
        group_ids=torch.zeros(len(TURNS), dtype=torch.int64),
        teacher_log_probs=teacher_log_probs,
        correct=REWARDS.bool(),
        has_reference=has_reference,
    )
    expected = build_estimator(step.trainer.estimator.name, {}).checked_signal(batch, step=0).advantages
    for row, is_models in enumerate(models_tokens):
        credit = step.output["advantages"][row, : len(is_models)][is_models]
        torch.testing.assert_close(credit, expected[row, : len(credit)], rtol=0, atol=1e-4)
    assert any(len(row.unique()) > 3 for row in expected), "credit must differ between tokens"


@pytest.mark.parametrize("offer", ["tools", "environment_factory"])
def test_a_context_is_trls_own_prompt_with_its_tools(offer: str, tmp_path: Any) -> None:
    tools = {"tools": [recorded_multiply([])], "environment_factory": Desk}
    trainer: Any = trainer_with_tools(str(tmp_path), TURNS, method="grpo", **{offer: tools[offer]})
    output = output_of_training(trainer)
    context = trainer._context(0, None)
    encoded = trainer.processing_class(text=[context.text], images=[context.images])
    assert output["prompt_ids"][0].tolist() == encoded["input_ids"][0]
    assert '"name": "multiply"' in context.text
    num_tool_tokens = 0
    for row in range(4):
        _, marks = response_by_hand(trainer, row)
        num_tool_tokens += marks.count(0)
    assert output["tool_mask"].eq(0).sum() == num_tool_tokens


def test_a_truncated_response_keeps_the_marks_of_its_tool(tmp_path: Any) -> None:
    """All calls have a result of 39 or 40 tokens; the rest of 112 tokens is too short, and TRL hides the responses."""
    config = {"mask_truncated_completions": True}
    options: dict[str, Any] = {"tools": [recorded_multiply([])], "max_completion_length": 112, "config": config}
    trainer: Any = trainer_with_tools(str(tmp_path), TURNS, method="cepo", **options)
    rows: list[Row] = []
    own_rows = trainer._own_rows

    def noted(*arguments: Any) -> list[Row]:
        rows.extend(own_rows(*arguments))
        return rows

    trainer._own_rows = noted
    output = output_of_training(trainer)
    assert output["completion_mask"].any(dim=1).tolist() == [False, False, True, False]
    assert [row.own.count(False) for row in rows] == [40, 39, 0, 39]


ZOOMS = ((call("zoom", '{"part": "left"}'), r"\boxed{18}"), (r"\boxed{3}",))


def test_a_tools_image_trains_without_teachers(tmp_path: Any) -> None:
    """The image takes 4 tokens of the result, which have no credit."""
    trainer: Any = trainer_with_tools(str(tmp_path), ZOOMS, tools=[zoom], method="grpo")
    output = output_of_training(trainer)
    is_image = output["completion_ids"] == trainer.model.config.image_token_id
    assert is_image.sum(dim=1).tolist() == [4, 0]
    assert not output["advantages"][is_image].any()
    assert output["advantages"][0, 0] > 0 > output["advantages"][1, 0]
    assert output["image_grid_thw"].shape[0] == 3, "two prompts and one result have an image"


@pytest.mark.parametrize("method", ["cepo", "visual", "grpo"])
def test_a_tools_image_is_refused_where_responses_are_scored(
    method: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = trainer_with_tools(str(tmp_path), ZOOMS, tools=[zoom], method=method)
    if method == "grpo":
        # As a method without teachers may.
        monkeypatch.setattr(type(trainer.estimator), "reads", ("group_ids", "old_log_probs"))
    with pytest.raises(DataError, match=f"a tool returned an image, and method {method} reads log-probs"):
        trainer.train()
