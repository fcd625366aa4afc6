"""Tokens that are left out of the update, whatever the method."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from factories import response_mask, rollouts_of
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.metrics import results
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import restricted
from cepo.types import Distillation, DivergenceConfig, TokenSignal

LENGTHS = (4, 2, 3, 4)
MASK = response_mask(LENGTHS)
LIVE = torch.tensor([True, True, True, False])
ENTROPIES = torch.tensor([[0.1, 2.0, 0.5, 0.0], [1.5, 0.2, 0, 0], [0.3, 0.9, 0.4, 0], [9.0, 9.0, 9.0, 9.0]])


def rollouts() -> Rollouts:
    """One group of four responses; the second was cut."""
    whole = rollouts_of([(1,) * length for length in LENGTHS])
    cut = [dataclasses.replace(each, finished=row != 1) for row, each in enumerate(whole.generations)]
    return dataclasses.replace(whole, generations=cut)


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


def test_tokens_of_cut_responses_teach_nothing_if_asked() -> None:
    assert torch.equal(learning(None)[0], MASK)
    kept, _ = learning(None, overlong_filter=True)
    assert torch.equal(kept, MASK & torch.tensor([True, False, True, True]).unsqueeze(1))


def test_the_top_share_of_live_tokens_by_entropy_learns() -> None:
    """A third of the 9 tokens of live rows is 3: those of 2.0, 1.5 and 0.9; dead rows do not raise the threshold."""
    kept, metrics = learning(ENTROPIES, top_entropy=1 / 3)
    assert kept[:3].nonzero().tolist() == [[0, 1], [1, 0], [2, 1]]
    assert metrics["rollout/learning_tokens"] == 3 / 9
    assert abs(metrics["rollout/vocabulary_entropy"] - 5.9 / 9) < 1e-6


def test_at_least_one_token_learns_and_none_of_a_cut_response() -> None:
    """Without the cut response 7 tokens are left, of which a seventh is 1."""
    kept, _ = learning(ENTROPIES, top_entropy=1 / 7, overlong_filter=True)
    assert kept[:3].nonzero().tolist() == [[0, 1]]
    assert int(learning(ENTROPIES, top_entropy=1e-9)[0][:3].sum()) == 1
