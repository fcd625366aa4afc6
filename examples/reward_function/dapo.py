"""Rewards the answer with +1 or -1, minus a penalty that grows over the last tokens before the length limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cepo.answers import equal, marked_answer
from cepo.rewards import ConfigError

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: Sequence[Mapping[str, Any]],
    *,
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> list[dict[str, float]]:
    """Returns `overall = accuracy + overlong` and its parts for each sample.

    With L the number of response tokens and `free = max_response_length - overlong_buffer_length`:
    `overlong = -overlong_penalty_factor * clamp((L - free) / overlong_buffer_length, 0, 1)`, which is 0 up to `free`
    tokens and the negative factor at the limit. `accuracy` is +1 for the correct answer and -1 for any other, whatever
    the length; `accuracy_normalized` is 1 and 0 instead, for `algorithm.filter_key`.

    Raises:
        ConfigError: the buffer is not within 1 .. max_response_length.
    """
    if not 1 <= overlong_buffer_length <= max_response_length:
        raise ConfigError(
            f"reward_function_kwargs: overlong_buffer_length is {overlong_buffer_length} with max_response_length "
            f"{max_response_length}; accepted: 1 to {max_response_length}"
        )
    free = max_response_length - overlong_buffer_length
    scores: list[dict[str, float]] = []
    for reward_input in reward_inputs:
        answer = marked_answer(reward_input["response"])
        is_right = answer is not None and equal(answer, reward_input["ground_truth"])
        accuracy = 1.0 if is_right else -1.0
        excess = (reward_input["response_length"] - free) / overlong_buffer_length
        overlong = -overlong_penalty_factor * min(max(excess, 0.0), 1.0)
        scores.append(
            {
                "overall": accuracy + overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": float(is_right),
            }
        )
    return scores
