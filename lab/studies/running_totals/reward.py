"""Rewards a response whose stated answer is the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.studies.running_totals.grading import stated_answer

REWARD_NAME = "running_totals"
REWARD_TYPE = "sequential"


def final_answer(response: str) -> str | None:
    """Returns the number after `Answer:`, which wrong references would quote."""
    return stated_answer(response)


def compute_score(reward_input: Mapping[str, Any]) -> dict[str, float]:
    """Returns 1 if the stated answer is the ground truth, else 0."""
    is_right = stated_answer(reward_input["response"]) == reward_input["ground_truth"]
    return {"overall": float(is_right), "accuracy": float(is_right)}
