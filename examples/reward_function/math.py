r"""Rewards the boxed answer (nine tenths) and the format `<think>...</think>` followed by `\boxed{...}` (one tenth)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cepo.answers import equal, marked_answer

REWARD_NAME = "math"
REWARD_TYPE = "batch"

# Some models write `< think >`.
_THOUGHT_THEN_BOX = re.compile(r"\s*<\s*think\s*>.*<\s*/\s*think\s*>.*\\boxed\s*\{.*\}.*", re.DOTALL)


def compute_score(reward_inputs: Sequence[Mapping[str, Any]], *, format_weight: float = 0.1) -> list[dict[str, float]]:
    r"""Returns `overall = (1 - format_weight) * accuracy + format_weight * format` and its parts for each sample.

    `accuracy` is 1 if the last `\boxed{}` (or `<answer>`) equals the ground truth. `format` is 1 if the response begins
    with `<think>...</think>` and has a box after it.
    """
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        response = reward_input["response"]
        answer = marked_answer(response)
        accuracy = float(answer is not None and equal(answer, reward_input["ground_truth"]))
        well_formed = float(_THOUGHT_THEN_BOX.fullmatch(response) is not None)
        overall = (1.0 - format_weight) * accuracy + format_weight * well_formed
        scores.append({"overall": overall, "accuracy": accuracy, "format": well_formed})
    return scores
