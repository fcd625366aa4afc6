"""Which log-probs an optimizer batch is given: the engine's, the trainer's, or both for importance weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from factories import rollouts_of

from cepo.config.loader import load_config
from cepo.rollout.generator import Generation
from cepo.trainer.asking import Rollouts
from cepo.trainer.loop import Trainer
from cepo.trainer.planning import ScoredBatch, ScoringPlan, actor_batches
from cepo.types import TokenSignal

TRAINERS, ENGINES = -1.0, -2.0


def rollouts() -> Rollouts:
    """Two prompts with two responses of three tokens each; the engine says -2 of every token."""
    generation = Generation(response_ids=(1, 2, 3), log_probs=(ENGINES,) * 3, finished=True)
    prompts = [SimpleNamespace(token_ids=(7,))] * 2
    return rollouts_of([(1, 2, 3)] * 4, problems=[None] * 2, prompts=prompts, generations=[generation] * 4)


def on_policy_rows(*settings: str) -> list[bool]:
    """Of the rollouts above, whose batches of the update have one prompt."""
    base = ["config=configs/microgeo/base.yaml", "data.rollout_batch_size=2", "worker.actor.global_batch_size=1"]
    trainer = cast("Trainer", SimpleNamespace(worker=load_config([*base, *settings]).worker))
    return Trainer._on_policy_rows(trainer, rollouts()).tolist()


@pytest.mark.parametrize(("epochs", "expected"), [(1, [True, True, False, False]), (2, [False] * 4)])
def test_only_the_first_of_one_epochs_batches_is_on_policy(epochs: int, expected: list[bool]) -> None:
    assert on_policy_rows(f"worker.actor.ppo_epochs={epochs}") == expected


def test_batches_after_the_first_have_both_log_probs() -> None:
    """Importance weights for the gap between engine and trainer need the engine's too."""
    asked = rollouts()
    plan = ScoringPlan(
        rollouts=asked,
        live=torch.ones(4, dtype=torch.bool),
        on_policy=torch.tensor([True, True, False, False]),
        student={},
        views=(),
        metrics={},
    )
    scored = ScoredBatch(
        plan=plan,
        old_log_probs=torch.full((4, 3), TRAINERS),
        teacher_log_probs={},
        token_level_rewards=torch.zeros(4, 3),
        reference_log_probs=None,
        values=None,
        metrics={},
    )
    signal = TokenSignal(advantages=torch.ones(4, 3))
    first, second = actor_batches(scored, signal, num_prompts=1, max_response_length=3)
    assert (first.on_policy, second.on_policy) == (True, False)
    assert first.old_log_probs.unique().tolist() == [ENGINES]
    assert first.sampled_log_probs is None  # `old_log_probs` are the engine's
    assert second.old_log_probs.unique().tolist() == [TRAINERS]
    assert second.sampled_log_probs is not None
    assert second.sampled_log_probs.unique().tolist() == [ENGINES]
