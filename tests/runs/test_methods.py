from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import picture, reference_model
from training_runs import Train, actor_of, batch_of, differing, encoded, parameters_of, reference_logits, rows_of

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import OWN_VIEW
from cepo.models.processing import Processing
from cepo.trainer.loop import Trainer
from cepo.workers.actor_critic import Actor, TeacherWeights

pytestmark = pytest.mark.heavy
ONE_STEP = "trainer.max_steps=1"


def test_a_fifth_of_the_tokens_learns_by_entropy(train: Train) -> None:
    """All rows of opsd learn; cut responses, most of an untrained model's, do not."""
    settings = ["algorithm.adv_estimator=opsd", "algorithm.top_entropy=0.2", ONE_STEP]
    [row] = train(*settings).metrics
    assert row["rollout/learning_tokens"] == pytest.approx(0.2, abs=0.01)
    assert row["rollout/vocabulary_entropy"] > 1.0
    assert row["actor/grad_norm"] > 0
    [other] = train(*settings, "algorithm.overlong_filter=true", name="filtered").metrics
    assert other["work/live_fraction"] < row["work/live_fraction"]


def test_an_adaptive_coefficient_moves_and_survives_a_resume(train: Train) -> None:
    settings = [
        f"algorithm.{each}" for each in ("disable_kl=false", "kl_type=adaptive", "kl_coef=0.1", "kl_horizon=160")
    ]
    train(*settings, "trainer.save_freq=1", ONE_STEP)
    resumed = train(*settings, "trainer.save_freq=1", "trainer.max_steps=2")
    coefficients = [row["critic/kl_coef"] for row in resumed.steps]
    # The KL of the first step is 0, so the error is cut at -0.2; 16 sequences of a horizon of 160 make that -2 %.
    assert coefficients == pytest.approx([0.1, 0.1 * (1 - 0.2 * 16 / 160)])


def test_the_critic_alone_is_trained_during_its_warm_up(train: Train) -> None:
    before: dict[str, Any] = {}

    def remember(trainer: Trainer) -> None:
        before.update(parameters_of(actor_of(trainer)))

    frozen = ["worker.actor.model.freeze_vision_tower=true", "worker.actor.ppo_epochs=2"]
    finished = train("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", *frozen, prepare=remember)
    assert differing(before, finished.parameters) == []
    assert finished.actor.module.encoder._known == {}, "features of a step's images are freed at its end"
    assert all("critic/vf_loss" in row for row in finished.steps)


def test_the_full_kl_is_that_of_plain_transformers(
    build_actor: Callable[..., Actor], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    actor, model = build_actor(optim__lr=1e-2), reference_model(tiny_model_folder)
    actor.reference_weights = TeacherWeights(actor.module, TeacherConfig(source="reference"))
    rows = rows_of([encoded(tiny_processing, "Find x.", picture(1))], [4, 9])
    scores = actor.score(rows)
    actor.score(rows, as_reference=True, keep_states=OWN_VIEW)
    assert torch.cat(actor.score(rows, result="reference_kl")).abs().max() < 1e-6
    actor.update([batch_of(rows, [1.0, 1.0], scores)], step=0)
    measured = actor.score(rows, result="reference_kl")
    initial = [reference_logits(model, row).log_softmax(dim=1) for row in rows]
    weights = {name.removeprefix("model."): value for name, value in parameters_of(actor).items()}
    model.load_state_dict(weights, strict=False)
    for row, values, before in zip(rows, measured, initial, strict=True):
        now = reference_logits(model, row).log_softmax(dim=1)
        torch.testing.assert_close(values, (now.exp() * (now - before)).sum(dim=1), atol=1e-6, rtol=1e-4)
        assert float(values.min()) > 1e-6


@pytest.mark.parametrize("in_loss", ["true", "false"])
def test_a_full_kl_trains_in_the_loss_and_in_the_reward(in_loss: str, train: Train) -> None:
    settings = ["algorithm.disable_kl=false", "algorithm.kl_penalty=full", "algorithm.kl_coef=0.1"]
    first, second = train(*settings, f"algorithm.use_kl_loss={in_loss}").steps
    assert first["critic/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["critic/kl"] > 1e-7
    assert ("actor/kl_loss" in second) == (in_loss == "true")
