"""Shows a reward that reads the prompt, another column of the row, and a keyword argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from cepo.answers import equal, marked_answer, normal_form

REWARD_NAME = "rounded"
REWARD_TYPE = "sequential"

_ASKS_FOR_ROUNDING = re.compile(r"\bround(?:ed)?\b", re.IGNORECASE)


def compute_score(reward_input: Mapping[str, Any], *, tolerance_key: str = "tolerance") -> dict[str, float]:
    """Returns 1 for the correct answer or a number within a tolerance of it; otherwise 0.

    The tolerance is the row's column `tolerance_key`, if it has one. Otherwise, if the prompt asks for rounding, it is
    half a unit of the ground truth's last digit: if this is 34.6, the unrounded 20√3 is accepted too.
    """
    answer = marked_answer(reward_input["response"])
    gold = reward_input["ground_truth"]
    if answer is None:
        return {"overall": 0.0, "accuracy": 0.0, "within_tolerance": 0.0}
    tolerance = reward_input.get(tolerance_key)
    if tolerance is None:
        is_rounding_asked = _ASKS_FOR_ROUNDING.search(reward_input["prompt"]) is not None
        tolerance = _half_a_unit(normal_form(gold)) if is_rounding_asked else 0.0
    is_exact = equal(answer, gold)
    is_near = equal(answer, gold, tolerance=float(tolerance))
    accuracy = float(is_near)
    return {"overall": accuracy, "accuracy": accuracy, "within_tolerance": float(is_near and not is_exact)}


def _half_a_unit(number: str) -> float:
    """Returns 0.05 for 34.6, and 0 if the text is not a plain decimal."""
    if not re.fullmatch(r"-?\d+\.\d+", number):
        return 0.0
    return float(Decimal(1).scaleb(int(Decimal(number).as_tuple().exponent))) / 2
