"""Drawing tokens from logits and evenly spread numbers, against counts worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cepo.errors import EngineError
from cepo.rollout.generator import SamplingSettings
from cepo.rollout.transformers_generator import draw_tokens, row_uniforms


def counts(logits: list[float], output: Sequence[int] = (), **settings: Any) -> list[int]:
    """How often each token is drawn over 1000 evenly spread uniform numbers; token 3 is banned."""
    row = torch.tensor(logits).expand(1000, -1)
    points = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen = SamplingSettings(num_samples=1, max_response_length=1, **settings)
    drawn = draw_tokens(row, [output] * 1000, points, torch.tensor([3]), chosen)
    return torch.bincount(drawn, minlength=row.shape[1]).tolist()


def test_draws_follow_the_distribution_of_allowed_tokens() -> None:
    logits = [math.log(weight) for weight in (0.1, 0.5, 0.4, 1000.0)]
    assert counts(logits) == [100, 500, 400, 0]
    assert counts(logits, top_k=2) == [0, 556, 444, 0]  # 5/9 and 4/9
    assert counts(logits, top_p=0.5) == [0, 1000, 0, 0]
    assert counts(logits, top_p=0.51) == [0, 556, 444, 0]
    assert counts(logits, temperature=0.5) == [24, 595, 381, 0]  # squares: 1, 25, 16 of 42
    assert counts(logits, temperature=0.0) == [0, 1000, 0, 0]
    # A penalty of log 5 makes 0.5 to 0.1 once, however often the token came: 1/6, 1/6 and 4/6.
    assert counts(logits, output=[1, 1], presence_penalty=math.log(5)) == [167, 166, 667, 0]


def test_a_rows_numbers_depend_on_seed_and_sample_alone() -> None:
    assert torch.equal(row_uniforms(7, 2, 10), row_uniforms(7, 2, 50)[:10])
    assert len({float(row_uniforms(seed, sample, 1)) for seed in range(30) for sample in range(30)}) == 900


def test_a_draw_keeps_its_logits_and_refuses_nan() -> None:
    logits = torch.zeros(1, 4)
    settings = SamplingSettings(num_samples=1, max_response_length=1, presence_penalty=2.0, top_k=2, top_p=0.5)
    draw_tokens(logits, [[1]], torch.tensor([0.5], dtype=torch.float64), torch.tensor([3]), settings)
    assert logits.count_nonzero() == 0, "the caller's logits were changed"
    with pytest.raises(EngineError, match="NaN"):
        counts([0.0, float("nan"), 0.0, 0.0])
