"""The entropy in the actor's loss: its gradient in every kind of pass, its metrics, and which rows have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generator_cases import reference_model
from rounding import GRADIENTS
from torch import Tensor
from training_runs import (
    ONE_STEP,
    BuildActor,
    Train,
    batch_of,
    gradient_of,
    mask_of,
    parameters_of,
    reference_logits,
    relative_gap,
)

from cepo.data.batch import Kept, OptimizerBatch, ScoringRow
from cepo.types import Distillation, DivergenceConfig
from cepo.workers import scoring_model
from testing.rows import gradients_of

pytestmark = pytest.mark.heavy

ADVANTAGES = (1.0, -0.7, 0.4, -1.2, 0.9, -0.3)


def on_policy_batch(rows: Sequence[ScoringRow], advantages: Sequence[float] = ADVANTAGES) -> OptimizerBatch:
    old = [torch.zeros(len(row.response_ids)) for row in rows]
    return batch_of(rows, advantages, old, on_policy=True)


def test_the_entropys_gradient_is_that_of_plain_transformers(
    build_actor: BuildActor, tiny_model_folder: Any, rows: list[ScoringRow]
) -> None:
    """`-0.3 sum_t H_t / tokens` alone, for rows without images, with one and with two."""
    actor = build_actor(entropy_coef="0.3")
    names = list(parameters_of(actor))
    batch = on_policy_batch(rows, [0.0] * 6)
    gradients = dict(zip(names, gradients_of(actor, batch), strict=True))
    model = reference_model(tiny_model_folder)
    model.requires_grad_(True)
    num_tokens = int(mask_of(rows).sum())
    for row in rows:
        log_p = reference_logits(model, row).log_softmax(dim=1)
        negative_entropy = (log_p.exp() * log_p).sum()
        (0.3 * negative_entropy / num_tokens).backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    flat_gradient = torch.cat([gradients[name].flatten() for name in gradients])
    flat_expected = torch.cat([expected[name].flatten() for name in gradients])
    assert relative_gap(flat_gradient, flat_expected) < GRADIENTS


SETTINGS: dict[str, dict[str, str]] = {
    "all weights": {},
    "frozen tower": {"model__freeze_vision_tower": "true"},
    "adapter": {"model__lora__rank": "4"},
    "16-bit logits": {"model__fp32_logits": "false"},
    "bf16": {"fsdp__mp_param_dtype": "bf16"},
    "small passes": {"micro_batch_size_per_device_for_update": "1"},
    "per sequence": {"loss_avg_mode": "seq"},
}


def test_beside_a_divergence_the_entropys_gradient_is_the_same(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    """The sums of gradients with and without distillation differ by the entropy's alone."""
    taught = [dataclasses.replace(row, view="taught") for row in rows]
    gradients: dict[tuple[bool, float], Tensor] = {}
    for distils in (False, True):
        for coefficient in (0.0, 0.5):
            actor = build_actor(entropy_coef=coefficient, max_grad_norm="1e9")
            batch = on_policy_batch(rows)
            if distils:
                actor.score(taught, temperature=1.5, keep=Kept("taught"))
                distillation = Distillation(
                    view="taught", divergence=DivergenceConfig(kind="jsd"), token_weight=mask_of(rows).float()
                )
                batch = dataclasses.replace(batch, distillation=distillation)
            gradients[distils, coefficient] = gradient_of(actor, batch)
    alone = gradients[False, 0.5] - gradients[False, 0.0]
    with_divergence = gradients[True, 0.5] - gradients[True, 0.0]
    assert relative_gap(with_divergence, alone) < 10 * GRADIENTS


def test_metrics_are_the_mean_entropy_and_its_share_of_the_loss(
    build_actor: BuildActor, rows: list[ScoringRow]
) -> None:
    """Over two optimizer steps of a learning rate of 0, with the coefficient 0.4."""
    actor = build_actor(entropy_coef="0.4", optim__lr="0")
    mean_entropy = float(torch.cat(actor.entropies(rows)).mean())
    batch = on_policy_batch(rows)
    metrics = actor.update([batch, batch], step=0)
    assert metrics["actor/entropy"].result == pytest.approx(mean_entropy, rel=1e-5)
    assert metrics["actor/entropy_loss"].result == pytest.approx(-0.4 * mean_entropy, rel=1e-5)


def test_without_a_coefficient_no_entropy_is_computed(
    build_actor: BuildActor, rows: list[ScoringRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("an entropy was computed")

    monkeypatch.setattr(scoring_model, "log_probs_and_entropies", computed)
    metrics = build_actor().update([on_policy_batch(rows)], step=0)
    assert not [name for name in metrics if name.startswith("actor/entropy")]


def test_a_bonus_widens_distributions_and_a_penalty_narrows_them(
    build_actor: BuildActor, rows: list[ScoringRow]
) -> None:
    changes: dict[float, float] = {}
    for coefficient in (1.0, -1.0):
        actor = build_actor(entropy_coef=coefficient, optim__lr="1e-3")
        entropy_before = float(torch.cat(actor.entropies(rows)).mean())
        actor.update([on_policy_batch(rows, [0.0] * 6)] * 3, step=0)
        changes[coefficient] = float(torch.cat(actor.entropies(rows)).mean()) - entropy_before
    assert changes[1.0] > 0.05
    assert changes[-1.0] < -0.05


def test_rows_of_equal_rewards_have_an_entropy_too(train: Train) -> None:
    """All rewards are equal, so that no row has an advantage, and the update moves the weights by the entropy alone."""
    still = train("worker.reward.reward_function=tests/reward_functions.py:never", ONE_STEP, name="still")
    moved = train(
        "worker.reward.reward_function=tests/reward_functions.py:never",
        "worker.actor.entropy_coef=0.1",
        ONE_STEP,
        name="moved",
    )
    assert still.steps[0]["work/live_fraction"] == moved.steps[0]["work/live_fraction"] == 0.0
    assert still.steps[0]["actor/grad_norm"] == 0.0
    assert moved.steps[0]["actor/grad_norm"] > 0.0
    assert moved.steps[0]["actor/entropy"] > 0.0
