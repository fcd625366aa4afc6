"""Neither the choice of references nor any advantage depends on the order of rollouts or of groups in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, token_batch
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator
from cepo.types import Rollout, RolloutGroup, TokenBatch

EVERY_RULE = [
    {},
    {"negative": {"select": "random"}},
    {"negative": {"select": "most_frequent"}},
    {"negative": {"strict_lowest": True}},
    {"positive": {"source": "peer_full"}, "negative": {"source": "peer_full"}},
]


@st.composite
def shuffled_rollouts(draw: st.DrawFn) -> tuple[list[Rollout], list[Rollout]]:
    """Two to eight rollouts of three reward levels, hence with many ties, and the same in another order."""
    size = draw(st.integers(2, 8))
    rollouts: list[Rollout] = []
    for index in range(size):
        correct = draw(st.booleans())
        answer = draw(st.sampled_from([None, "40", "50"]))
        reward = 1.0 if correct else draw(st.sampled_from([0.0, 0.1]))
        rollouts.append(rollout(index, reward, "70" if correct else answer, correct=correct, ids=(index, index + 1)))
    return rollouts, draw(st.permutations(rollouts))


@pytest.mark.parametrize("config", EVERY_RULE)
@given(pair=shuffled_rollouts())
def test_permuting_tied_rollouts_changes_no_reference(
    config: dict[str, dict[str, object]], pair: tuple[list[Rollout], list[Rollout]]
) -> None:
    estimator = build_estimator("cepo", config)
    groups: list[RolloutGroup] = [group(*rollouts) for rollouts in pair]
    assert estimator.references(groups[0]) == estimator.references(groups[1])


def permuted(batch: TokenBatch, order: torch.Tensor) -> TokenBatch:
    """The batch with its rows in another order."""
    return TokenBatch(
        token_level_rewards=batch.token_level_rewards[order],
        response_mask=batch.response_mask[order],
        old_log_probs=batch.old_log_probs[order],
        group_ids=batch.group_ids[order],
        teacher_log_probs={name: view[order] for name, view in batch.teacher_log_probs.items()},
        correct=batch.correct[order],
    )


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
@pytest.mark.parametrize("name", ["grpo", "rlsd", "cepo"])
@given(data=st.data())
def test_permuting_rows_permutes_advantages_bit_for_bit(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    batch = data.draw(batches(dtype))
    order = torch.tensor(data.draw(st.permutations(range(len(batch.correct)))))
    estimator = build_estimator(name)
    straight = estimator.signal(batch, step=3).advantages
    assert same_bits(estimator.signal(permuted(batch, order), step=3).advantages, straight[order])


@given(data=st.data())
def test_a_group_alone_gets_the_bits_it_gets_in_the_batch(data: st.DataObject) -> None:
    batch = data.draw(batches(torch.float32))
    estimator = build_estimator("cepo")
    whole = estimator.signal(batch, step=0).advantages
    for identity in batch.group_ids.unique():
        rows = (batch.group_ids == identity).nonzero().squeeze(1)
        assert same_bits(estimator.signal(permuted(batch, rows), step=0).advantages, whole[rows])


def test_renaming_group_ids_changes_no_bit() -> None:
    old, correct, wrong = log_probs_like((3, 6, 4), seed=5)
    rewards = [1.0, 0.1, 0.0, 0.0, 1.0, 0.1]
    views = {"correct": correct, "wrong": wrong}
    batch = token_batch(rewards, [0, 1, 0, 1, 0, 1], lengths=[4, 3, 2, 4, 1, 4], old=old, views=views)
    renamed = replace(batch, group_ids=torch.tensor([900, -5, 900, -5, 900, -5]))
    estimator = build_estimator("cepo")
    straight, other = (estimator.signal(each, step=0).advantages for each in (batch, renamed))
    assert same_bits(straight, other)
