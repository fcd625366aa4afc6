"""Rounds of sampling under online filtering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from cepo.config.schema import AlgorithmConfig
from cepo.metrics import results
from cepo.rollout.base import Generation
from cepo.trainer.filtering import collect_batch
from cepo.trainer.rollouts import RolloutBatch


def rounds_mixed_from(first: int) -> Callable[[], RolloutBatch]:
    """Rounds of one prompt with two responses, both wrong before round `first`, of which one is right from then on."""
    asked = 0

    def next_round() -> RolloutBatch:
        nonlocal asked
        asked += 1
        rewards = [float(asked >= first), 0.0]
        generation = Generation(response_ids=(1,), log_probs=(0.0,), finished=True)
        return RolloutBatch(
            step=0,
            problems=cast("Any", [None]),
            prompts=cast("Any", [None]),
            generations=[generation, generation],
            responses=["", ""],
            scores=[{"overall": reward} for reward in rewards],
            rewards=torch.tensor(rewards),
            correct=torch.tensor(rewards) > 0.5,
        )

    return next_round


@pytest.mark.parametrize(
    ("max_rounds", "rounds", "filled"), [(20, 20, 2), (40, 26, 0), (0, 26, 0), (-1, 26, 0), (1, 2, 2)]
)
def test_rounds_are_asked_up_to_the_limit_and_without_end_where_it_is_0_or_less(
    max_rounds: int, rounds: int, filled: int
) -> None:
    batch, metrics = collect_batch(rounds_mixed_from(25), AlgorithmConfig(), num_groups=2, max_rounds=max_rounds)
    values = results(metrics)
    assert (values["filter/rounds"], values["filter/filled_groups"]) == (rounds, filled)
    assert batch.rewards.tolist() == ([0.0] * 4 if filled else [1.0, 0.0] * 2)
