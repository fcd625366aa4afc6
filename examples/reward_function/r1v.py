"""Rewards one sample at a time: half for the answer, half for `<think>` and `<answer>` tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cepo.answers import equal

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"

_WHOLE = re.compile(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(reward_input: Mapping[str, Any], *, format_weight: float = 0.5) -> dict[str, float]:
    """Returns `overall = (1 - format_weight) * accuracy + format_weight * format` and its parts.

    `format` is 1 if the whole response is `<think>...</think><answer>...</answer>`. `accuracy` is 1 if the last
    `<answer>`, wherever it is, equals the ground truth.
    """
    response = reward_input["response"]
    answers = _ANSWER.findall(response)
    accuracy = float(bool(answers) and equal(answers[-1].strip(), reward_input["ground_truth"]))
    well_formed = float(_WHOLE.fullmatch(response) is not None and len(answers) == 1)
    overall = (1.0 - format_weight) * accuracy + format_weight * well_formed
    return {"overall": overall, "accuracy": accuracy, "format": well_formed}
