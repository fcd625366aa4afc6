"""Rewards: reading and comparing answers, the reward function's contract and loader, the pool that runs it.

Importing this package imports none of its parts: `answers` brings sympy, which most processes never need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cepo.rewards.answers import answers_equal, extract_answer, normalise_answer
    from cepo.rewards.contract import RewardInput, RewardScore, validate_score, validate_scores
    from cepo.rewards.loader import LoadedReward, load_reward_function, resolve_reward_path
    from cepo.rewards.pool import RewardOutcome, RewardPool
    from cepo.rewards.stream import RewardStream

_HOMES = {
    "answers_equal": "answers",
    "extract_answer": "answers",
    "normalise_answer": "answers",
    "RewardInput": "contract",
    "RewardScore": "contract",
    "validate_score": "contract",
    "validate_scores": "contract",
    "LoadedReward": "loader",
    "load_reward_function": "loader",
    "resolve_reward_path": "loader",
    "RewardOutcome": "pool",
    "RewardPool": "pool",
    "RewardStream": "stream",
}

__all__ = [
    "LoadedReward",
    "RewardInput",
    "RewardOutcome",
    "RewardPool",
    "RewardScore",
    "RewardStream",
    "answers_equal",
    "extract_answer",
    "load_reward_function",
    "normalise_answer",
    "resolve_reward_path",
    "validate_score",
    "validate_scores",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"cepo.rewards.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'cepo.rewards' has no attribute {name!r}")
