"""How many tokens follow the first place of a response at which its answer would have been right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cepo.answers import marked_answer
from cepo.config.worker_schema import RewardConfig
from cepo.rewards.first_right_answer import tokens_past_right_answer
from cepo.rewards.pool import RewardPool

CASES: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("first_right_answers.yaml").read_text(encoding="utf-8")
)


def last_number(response: str) -> str | None:
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", response)
    return numbers[-1] if numbers else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: "".join(case["texts"]))
def test_tokens_after_the_first_right_place_are_counted(case: dict[str, Any]) -> None:
    assert tokens_past_right_answer(case["texts"], case["truth"], last_number) == case["past"]


def test_an_answer_in_a_box_is_right_where_the_box_closes() -> None:
    texts = ["\\boxed", "{", "0", ".", "5", "}", " is", " it"]
    assert tokens_past_right_answer(texts, r"\frac{1}{2}", marked_answer) == 2


@pytest.mark.heavy
def test_a_pool_counts_by_its_answer_function() -> None:
    """Of three responses to 14, the second is right nowhere and the third breaks the answer function: both have None."""
    config = RewardConfig(answer_function=f"{__file__}:fragile_number")
    with RewardPool(config) as pool:
        assert pool.has_answer_function
        responses = [(["1", "4", " apples"], "14"), (["1", "5"], "14"), (["broken", " ", "1", "4"], "14")]
        assert pool.tokens_past_right_answers(responses) == [1, None, None]
    with RewardPool(RewardConfig()) as pool:
        assert not pool.has_answer_function


def fragile_number(response: str) -> str | None:
    if response.startswith("broken"):
        raise ValueError(response)
    return last_number(response)
