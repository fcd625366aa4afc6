"""Implements the default reward: whether the final answer is right."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers import equal, marked_answer
from cepo.errors import ConfigError
from cepo.files.trees import Fields

REWARD_NAME = "math"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: Sequence[Fields], *, format_weight: float = 0.0) -> list[dict[str, float]]:
    r"""Scores a batch: `overall = (1 - format_weight) * accuracy + format_weight * format`.

    `accuracy` is 1 if the extracted answer equals `ground_truth` (`cepo.answers.equal`), else 0. `format` is 1 if the
    response has an answer, a non-empty `\boxed{}` or `<answer>`, else 0. With `worker.reward.answer_function`, the
    answer is the one that this function found (`extracted_answer`). `RewardPool` enforces the time limit. Raises
    `ConfigError` if `format_weight` is outside 0..1.
    """
    if not 0.0 <= format_weight <= 1.0:
        raise ConfigError(f"format_weight = {format_weight}: give a number from 0 to 1.")
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        if "extracted_answer" in reward_input:
            answer: str | None = reward_input["extracted_answer"]
        else:
            answer = marked_answer(reward_input["response"])
        accuracy = float(answer is not None and equal(answer, reward_input["ground_truth"]))
        has_answer = float(answer is not None)
        overall = (1.0 - format_weight) * accuracy + format_weight * has_answer
        scores.append({"overall": overall, "accuracy": accuracy, "format": has_answer})
    return scores
