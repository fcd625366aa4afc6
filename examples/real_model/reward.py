"""Rewards a response whose last whole number is the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REWARD_NAME = "last_number"
REWARD_TYPE = "sequential"

# A decimal number or one with commas is no whole number of this task, so it is taken whole and then refused.
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def last_number(response: str) -> str | None:
    """Returns the last number of the response if it is whole, else None: the answer that wrong references quote."""
    numbers = _NUMBER.findall(response)
    if not numbers or not numbers[-1].lstrip("-").isdigit():
        return None
    return numbers[-1]


def compute_score(reward_input: Mapping[str, Any]) -> dict[str, float]:
    """Returns 1 if the last whole number of the response is the ground truth, else 0."""
    answer = last_number(reward_input["response"])
    is_right = answer is not None and int(answer) == int(reward_input["ground_truth"])
    return {"overall": float(is_right), "accuracy": float(is_right)}
