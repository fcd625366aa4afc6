"""Drawing tokens from logits and evenly spread numbers, against counts worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cepo.errors import EngineError
from cepo.rollout.generator import SamplingSettings
from cepo.rollout.transformers_generator import draw_tokens, row_uniforms


def drawn_tokens(
    logits: Tensor, uniforms: Tensor, *, output: Sequence[int] = (), banned: Sequence[int] = (), **settings: Any
) -> Tensor:
    """A token for each row of logits, all of which have the same output so far."""
    sampling = SamplingSettings(num_samples=1, max_response_length=1, **settings)
    outputs = [output] * len(logits)
    return draw_tokens(logits, outputs, uniforms.double(), torch.tensor(banned, dtype=torch.long), sampling)


def counts(logits: list[float], output: Sequence[int] = (), **settings: Any) -> list[int]:
    """How often each token is drawn over 1000 evenly spread uniform numbers; token 3 is banned."""
    row = torch.tensor(logits).expand(1000, -1)
    points = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = drawn_tokens(row, points, output=output, banned=[3], **settings)
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
    numbers: set[float] = set()
    for seed in range(30):
        for sample in range(30):
            numbers.add(float(row_uniforms(seed, sample, 1)))
    assert len(numbers) == 900


def test_a_draw_keeps_its_logits() -> None:
    logits = torch.zeros(1, 4)
    middle = torch.tensor([0.5])
    drawn_tokens(logits, middle, output=[1], banned=[3], presence_penalty=2.0, top_k=2, top_p=0.5)
    assert logits.count_nonzero() == 0, "the caller's logits were changed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_logit_that_is_no_number_is_refused(wrong: float, temperature: float) -> None:
    with pytest.raises(EngineError, match="NaN"):
        counts([0.0, wrong, 0.0, 0.0], temperature=temperature)


def test_a_row_whose_allowed_tokens_are_impossible_is_refused() -> None:
    with pytest.raises(EngineError, match="NaN"):
        counts([-math.inf, -math.inf, -math.inf, 0.0])


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 500, 49_152])
def test_a_draw_is_where_the_cumulative_sum_exceeds_it(vocabulary: int) -> None:
    """Over several blocks of the search, against one float64 sum over the vocabulary; a tie of rounding may be either."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(300, vocabulary, generator=generator)
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    drawn = drawn_tokens(logits, uniforms, temperature=0.7)
    probabilities = (logits.double() / 0.7).softmax(dim=1)
    columns = drawn.unsqueeze(1)
    upper_edge = probabilities.cumsum(dim=1).gather(1, columns).squeeze(1)
    lower_edge = upper_edge - probabilities.gather(1, columns).squeeze(1)
    assert (lower_edge <= uniforms + 1e-6).all()
    assert (upper_edge >= uniforms - 1e-6).all()


def test_the_ends_of_a_distribution_are_possible_tokens() -> None:
    """Also where whole blocks of the vocabulary have probability 0."""
    logits = torch.full((2, 1000), -math.inf)
    logits[:, [130, 131, 700]] = 0.0
    almost_one = math.nextafter(1.0, 0.0)
    uniforms = torch.tensor([0.0, almost_one], dtype=torch.float64)
    assert drawn_tokens(logits, uniforms, banned=[131]).tolist() == [130, 700]


@pytest.mark.parametrize("uniform", [math.nextafter(1.0, 0.0), 1.0])
def test_a_number_that_rounds_to_the_end_draws_a_token(uniform: float) -> None:
    """The float32 sum of a block exceeds that of its tokens in float64 in about half of the rows."""
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    logits[:, -1] = -math.inf
    uniforms = torch.full((200,), uniform, dtype=torch.float64)
    drawn = drawn_tokens(logits, uniforms, banned=[0])
    assert drawn.tolist() == [62] * 200
