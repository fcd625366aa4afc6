"""Tokens that are left out of the update, whatever the method."""

from __future__ import annotations

from typing import Any, cast

import torch
from factories import response_mask
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.metrics import results
from cepo.rollout.generator import Generation
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import restricted
from cepo.types import Distillation, DivergenceConfig, TokenSignal

LENGTHS = (4, 2, 3, 4)
MASK = response_mask(LENGTHS)
LIVE = torch.tensor([True, True, True, False])
ENTROPIES = torch.tensor([[0.1, 2.0, 0.5, 0.0], [1.5, 0.2, 0, 0], [0.3, 0.9, 0.4, 0], [9.0, 9.0, 9.0, 9.0]])


def rollouts() -> Rollouts:
    """One group of four responses; the second was cut."""
    return Rollouts(
        step=0,
        problems=cast("Any", [None]),
        prompts=cast("Any", [None]),
        generations=[
            Generation(response_ids=(1,) * length, log_probs=(0.0,) * length, finished=place != 1)
            for place, length in enumerate(LENGTHS)
        ],
        responses=[""] * 4,
        scores=[{"overall": 0.0}] * 4,
        correct=torch.tensor([False] * 4),
    )


def signal() -> TokenSignal:
    weights = MASK.float()
    return TokenSignal(
        advantages=2 * weights,
        distillation=Distillation(view="correct", divergence=DivergenceConfig(), token_weight=weights),
    )


def learning(entropies: Tensor | None, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Which tokens still learn; advantages and the weight of the divergence are left out alike."""
    found = restricted(signal(), rollouts(), LIVE, entropies, AlgorithmConfig(**settings))
    assert found.distillation is not None
    assert torch.equal(found.distillation.token_weight * 2, found.advantages)
    return found.advantages > 0, results(found.metrics)


def test_nothing_is_left_out_by_default() -> None:
    assert torch.equal(learning(None)[0], MASK)


def test_tokens_of_cut_responses_teach_nothing() -> None:
    kept, _ = learning(None, overlong_filter=True)
    assert kept.any(dim=1).tolist() == [True, False, True, True]
    assert torch.equal(kept[[0, 2, 3]], MASK[[0, 2, 3]])


def test_the_top_share_of_live_tokens_by_entropy_learns() -> None:
    """A third of the 9 tokens of live rows is 3: those of 2.0, 1.5 and 0.9; dead rows do not raise the threshold."""
    kept, metrics = learning(ENTROPIES, top_entropy=1 / 3)
    assert kept[:3].nonzero().tolist() == [[0, 1], [1, 0], [2, 1]]
    assert metrics["rollout/learning_tokens"] == 3 / 9
    assert abs(metrics["rollout/vocabulary_entropy"] - 5.9 / 9) < 1e-6


def test_cut_responses_do_not_count_among_the_top_share() -> None:
    """Without the cut response 7 tokens are left, of which a seventh is 1."""
    kept, _ = learning(ENTROPIES, top_entropy=1 / 7, overlong_filter=True)
    assert kept[:3].nonzero().tolist() == [[0, 1]]


def test_at_least_one_token_learns() -> None:
    assert int(learning(ENTROPIES, top_entropy=1e-9)[0][:3].sum()) == 1
