"""Reward functions for TRL and verl: 1 if the final answer of a response is right, else 0.

GRPOTrainer(reward_funcs=cepo.answers.trl_reward, ...)                # the data's column `answer`
custom_reward_function.path=.../cepo/answers/reward_functions.py      # verl, with
custom_reward_function.name=verl_reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cepo.answers.comparison import equal
from cepo.answers.final_answers import final_answer, kind_of


def trl_reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Returns the reward of each completion, a text or a conversation, by the column `answer` of the data."""
    del columns  # the prompts and the data's other columns
    texts = [_text_of(completion) for completion in completions]
    return [_reward(text, truth) for text, truth in zip(texts, answer, strict=True)]


def verl_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Returns the reward of one response by verl's contract."""
    del data_source, extra_info
    return _reward(solution_str, ground_truth)


def _reward(response: str, truth: str) -> float:
    answer = final_answer(response, kind_of(truth))
    return float(answer is not None and equal(answer, truth))


def _text_of(completion: Any) -> str:
    """Returns a completion's text; of a conversation, that of the last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
