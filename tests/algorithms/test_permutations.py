"""No advantage depends on the order of rollouts or of groups in the batch; references: trainer/test_references_fuzz.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import log_probs_like, same_bits, token_batch
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator
from cepo.types import TokenBatch


def permuted(batch: TokenBatch, order: torch.Tensor) -> TokenBatch:
    """The batch with its rows in another order."""
    moved: dict[str, object] = {}
    for name, value in vars(batch).items():
        moved[name] = value[order] if isinstance(value, torch.Tensor) else {key: of[order] for key, of in value.items()}
    return replace(batch, **moved)


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype) -> TokenBatch:
    sizes = draw(st.lists(st.integers(2, 7), min_size=1, max_size=4))
    rows = sum(sizes)
    levels = draw(st.sampled_from([[0.0, 1.0], [0.0, 0.1, 0.9, 1.0], [0.1, 0.2, 0.3], [-1.7, 0.3, 2.9]]))
    rewards = draw(st.lists(st.sampled_from(levels), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    seed = draw(st.integers(0, 999))
    old, correct, wrong = log_probs_like((3, rows, 5), seed)
    group_ids = [11 * position for position, size in enumerate(sizes) for _ in range(size)]
    views = {"correct": correct, "wrong": wrong}
    return token_batch(rewards, group_ids, lengths=lengths, old=old, views=views, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["grpo", "rlsd", "cepo", "grpo_passk", "rloo", "remax", "reinforce_plus_plus", "gae"])
@given(data=st.data())
def test_permuting_rows_permutes_advantages_bit_for_bit(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Those that are whitened over the batch up to rounding."""
    batch = data.draw(batches(dtype))
    order = torch.tensor(data.draw(st.permutations(range(len(batch.correct)))))
    estimator = build_estimator(name)
    straight = estimator.signal(batch, step=3).advantages[order]
    moved = estimator.signal(permuted(batch, order), step=3).advantages
    torch.testing.assert_close(moved, straight, rtol=1e-6, atol=1e-7)
    assert same_bits(moved, straight) or name in ("reinforce_plus_plus", "gae")


@given(data=st.data())
def test_a_group_alone_or_renamed_keeps_its_bits(data: st.DataObject) -> None:
    batch = data.draw(batches(torch.float32))
    estimator = build_estimator("cepo")
    whole = estimator.signal(batch, step=0).advantages
    renamed = replace(batch, group_ids=900 - 7 * batch.group_ids)
    assert same_bits(estimator.signal(renamed, step=0).advantages, whole)
    for identity in batch.group_ids.unique():
        rows = (batch.group_ids == identity).nonzero().squeeze(1)
        assert same_bits(estimator.signal(permuted(batch, rows), step=0).advantages, whole[rows])
