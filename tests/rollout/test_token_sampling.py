"""Drawing tokens from logits and evenly spread numbers, against counts worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cepo.errors import EngineError
from cepo.rollout.token_sampling import draw_tokens, row_uniforms, without_repeats


def counts(logits: list[float], **settings: Any) -> list[int]:
    """How often each token is drawn over 1000 evenly spread uniform numbers."""
    row = torch.tensor(logits).expand(1000, -1)
    points = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | settings
    drawn = draw_tokens(row, points, torch.tensor([3]), **chosen)
    return torch.bincount(drawn, minlength=row.shape[1]).tolist()


def test_draws_follow_the_distribution_of_allowed_tokens() -> None:
    logits = [math.log(weight) for weight in (0.1, 0.5, 0.4, 1000.0)]  # the last token is banned
    assert counts(logits) == [100, 500, 400, 0]
    assert counts(logits, top_k=2) == [0, 556, 444, 0]  # 5/9 and 4/9
    assert counts(logits, top_p=0.5) == [0, 1000, 0, 0]
    assert counts(logits, top_p=0.51) == [0, 556, 444, 0]
    assert counts(logits, temperature=0.5) == [24, 595, 381, 0]  # squares: 1, 25, 16 of 42
    assert counts(logits, temperature=0.0) == [0, 1000, 0, 0]


def test_a_presence_penalty_counts_each_token_once() -> None:
    """Token 1 twice and token 0 once in the first row, nothing in the second."""
    logits = torch.zeros(2, 4)
    assert without_repeats(logits, [[1, 0, 1], []], 2.0).tolist() == [[-2.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert logits.count_nonzero() == 0, "the caller's logits were changed"
    assert without_repeats(logits, [[1], [2]], 0.0) is logits


def test_a_rows_numbers_depend_on_seed_and_sample_alone() -> None:
    assert torch.equal(row_uniforms(7, 2, 10), row_uniforms(7, 2, 50)[:10])
    assert len({float(row_uniforms(seed, sample, 1)) for seed in range(30) for sample in range(30)}) == 900


def test_logits_that_are_not_numbers_end_the_draw() -> None:
    with pytest.raises(EngineError, match="NaN"):
        counts([0.0, float("nan"), 0.0, 0.0])
