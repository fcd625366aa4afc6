"""A trainer of TRL's whose model calls tools as a script says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, LogitsProcessor
from trl import GRPOConfig  # pyright: ignore[reportMissingImports]
from trl.chat_template_utils import qwen3_vl_chat_template  # pyright: ignore[reportMissingImports]

from cepo.errors import DataError
from cepo.integrations.trl import CepoTrainer
from cepo.microgeo.world import ASSETS, SHAPES
from cepo.rewards.math import compute_score


def call(name: str, arguments: str) -> str:
    """Returns a turn that calls a tool, in the form of Qwen3-VL."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TURNS: tuple[tuple[str, ...], ...] = (
    (call("multiply", '{"a": 6, "b": 3}'), r"\boxed{18}"),
    (call("multiply", '{"a": 3, "b": 3}'), r"\boxed{9}"),
    (r"\boxed{3}",),
    (call("multiply", '{"a": 2, "b": 3}'), call("multiply", '{"a": 6, "b": 3}'), r"so \boxed{18}"),
)
"""The model's turns in each response to the first problem, a hexagon with sides of 3."""


class Scripted(LogitsProcessor):
    """Leaves each row of a batch one possible token: the next of its line."""

    def __init__(self, lines: Sequence[Sequence[int]], prompt_length: int) -> None:
        self._lines = lines
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns logits (B, V) of 0 for the line's next token and minus infinity for all others."""
        if len(input_ids) != len(self._lines):
            raise DataError(f"the script has {len(self._lines)} lines for this turn, and {len(input_ids)} rows speak")
        position = input_ids.shape[1] - self._prompt_length
        forced = torch.full_like(scores, -torch.inf)
        for row, line in enumerate(self._lines):
            forced[row, line[min(position, len(line) - 1)]] = 0.0
        return forced


def follow_script(model: Any, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
    """Makes the model's generation write `turns` of each row; rows whose turns are over are not asked again."""
    generate = model.generate
    turn_numbers = itertools.count()

    def scripted(input_ids: Tensor, **options: Any) -> Tensor:
        turn = next(turn_numbers)
        lines: list[list[int]] = []
        for turns_of_row in turns:
            if turn < len(turns_of_row):
                lines.append([*tokenizer(turns_of_row[turn])["input_ids"], tokenizer.eos_token_id])
        script = Scripted(lines, input_ids.shape[1])
        return generate(input_ids=input_ids, logits_processor=[script], **options)

    model.generate = scripted


def right_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Rewards a conversation whose last turn states the right answer."""
    rows: list[dict[str, Any]] = []
    for messages, truth in zip(completions, answer, strict=True):
        rows.append({"response": messages[-1]["content"], "ground_truth": truth})
    return [score["overall"] for score in compute_score(rows)]


def trainer_with_tools(
    folder: str,
    turns: Sequence[Sequence[str]],
    *,
    max_completion_length: int = 256,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> CepoTrainer:
    """Returns a trainer whose model answers the first problem of the toy task by these turns, one response each."""
    processor = AutoProcessor.from_pretrained(ASSETS)
    processor.chat_template = qwen3_vl_chat_template
    model = AutoModelForImageTextToText.from_pretrained(ASSETS, dtype="float32")
    follow_script(model, processor.tokenizer, turns)
    problem = SHAPES.generate(0, 0, stream="train")
    question = {"role": "user", "content": f"{problem.question} Answer in \\boxed{{}}."}
    row = {"prompt": [question], "images": [SHAPES.draw(problem)], "answer": problem.answer}
    arguments = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        learning_rate=1e-4,
        per_device_train_batch_size=len(turns),
        gradient_accumulation_steps=1,
        num_generations=len(turns),
        max_completion_length=max_completion_length,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(config or {}),
    )
    return CepoTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=right_answer,
        args=arguments,
        train_dataset=Dataset.from_list([row]),
        **options,
    )


def output_of_training(trainer: CepoTrainer) -> dict[str, Any]:
    """Trains, and returns what the trainer made of its last rollouts."""
    outputs: list[dict[str, Any]] = []
    score: Callable[..., dict[str, Any]] = trainer._generate_and_score_completions

    def noted(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs.append(score(inputs))
        return dict(outputs[-1])

    trainer._generate_and_score_completions = noted
    trainer.train()
    return outputs[-1]
