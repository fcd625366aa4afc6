"""What KL, filtering, distillation and the leak probe do in the training loop; `test_golden_weights` trains every method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import (
    EVERY_WRONG_ROLLOUT_TEACHES,
    actor_of,
    differing,
    encoded,
    parameters_of,
    picture,
    random_response,
    reference_logits,
    reference_model,
    run,
)

from cepo.algorithms.settings import DivergenceConfig, TeacherConfig
from cepo.data.batch import OWN_VIEW, DistillationRows, OptimizerBatch, ScoringRow
from cepo.losses.policy import LossDenominators
from cepo.trainer.loop import Trainer
from cepo.workers.swapping import TeacherWeights

pytestmark = pytest.mark.heavy

NO_KL = "algorithm.disable_kl=true"


def test_a_fifth_of_the_tokens_learns_by_entropy(tiny_run: list[str], tmp_path: Path) -> None:
    """All rows of opsd learn; cut responses, most of an untrained model's, do not."""
    settings = ["algorithm.adv_estimator=opsd", "algorithm.top_entropy=0.2", "trainer.max_steps=1"]
    finished = run(tiny_run, *settings, folder=tmp_path / "all")
    (row,) = (row for row in finished.metrics if "rollout/learning_tokens" in row)
    assert row["rollout/learning_tokens"] == pytest.approx(0.2, abs=0.01)
    assert row["rollout/vocabulary_entropy"] > 1.0
    assert row["actor/grad_norm"] > 0
    filtered = run(tiny_run, *settings, "algorithm.overlong_filter=true", folder=tmp_path / "filtered")
    (other,) = (row for row in filtered.metrics if "work/live_fraction" in row)
    assert other["work/live_fraction"] < row["work/live_fraction"]


def test_rows_without_a_teacher_have_zero_distillation_gradient(build_actor: Any, tiny_processing: Any) -> None:
    actor = build_actor()
    row = ScoringRow(context=encoded(tiny_processing, "Find x."), response_ids=random_response(6, 3), row=0)
    taught = dataclasses.replace(row, row=1, view="hinted")
    actor.score([row, taught], as_teacher=True, keep_states="hinted")
    batch = OptimizerBatch(
        rows=[row],
        old_log_probs=torch.zeros(1, 6),
        advantages=torch.zeros(1, 6),
        response_mask=torch.ones(1, 6, dtype=torch.bool),
        denominators=LossDenominators(num_tokens=6, num_sequences=1, max_response_length=6),
        distillation=DistillationRows(
            divergence=DivergenceConfig(kind="jsd"), token_weight=torch.zeros(1, 6), view="hinted"
        ),
    )
    metrics = actor.update([batch], step=0)
    assert metrics["actor/grad_norm"].result == 0.0
    assert metrics["actor/distillation_loss"].result == 0.0


def test_an_adaptive_coefficient_moves_and_survives_a_resume(tiny_run: list[str], tmp_path: Path) -> None:
    settings = [
        "algorithm.disable_kl=false",
        "algorithm.kl_type=adaptive",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_horizon=160",
        "trainer.save_freq=1",
    ]
    run(tiny_run, *settings, "trainer.max_steps=1", folder=tmp_path)
    resumed = run(tiny_run, *settings, "trainer.max_steps=2", folder=tmp_path)
    coefficients = [row["critic/kl_coef"] for row in resumed.metrics if "critic/kl_coef" in row]
    # The KL of the first step is 0, so the error is cut at -0.2; 16 sequences of a horizon of 160 make that -2 %.
    assert coefficients == pytest.approx([0.1, 0.1 * (1 - 0.2 * 16 / 160)])


def test_online_filtering_keeps_mixed_groups_alone(tiny_run: list[str], tmp_path: Path) -> None:
    settings = ["algorithm.online_filtering=true", "data.mini_rollout_batch_size=2", "trainer.max_steps=1"]
    finished = run(tiny_run, *settings, NO_KL, folder=tmp_path)
    (row,) = (row for row in finished.metrics if "filter/rounds" in row)
    assert row["filter/rounds"] >= 2
    assert row["groups/mixed"] == 1.0
    assert finished.trainer.state.rounds == row["filter/rounds"]


def test_the_critic_alone_is_trained_during_its_warm_up(tiny_run: list[str], tmp_path: Path) -> None:
    before: dict[str, Any] = {}

    def remember(trainer: Trainer) -> None:
        before.update(parameters_of(actor_of(trainer)))

    overrides = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.max_steps=2"]
    frozen = ["worker.actor.model.freeze_vision_tower=true", "worker.actor.ppo_epochs=2"]
    finished = run(tiny_run, *overrides, *frozen, folder=tmp_path, prepare=remember)
    assert differing(before, finished.parameters) == []
    assert finished.actor.module.encoder._known == {}, "features of a step's images are freed at its end"
    assert all("critic/vf_loss" in row for row in finished.metrics if "reward/mean" in row)


def test_two_epochs_over_a_batch_consult_the_teachers_once(tiny_run: list[str], tmp_path: Path) -> None:
    settings = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES, "trainer.max_steps=1"]
    signals: list[torch.Tensor] = []

    def watch(trainer: Trainer) -> None:
        update = trainer.backend.update

        def watched(batches: Any, *, step: int) -> Any:
            signals.extend(batch.advantages for batch in batches)
            return update(batches, step=step)

        trainer.backend.update = watched  # type: ignore[method-assign]

    finished = run(tiny_run, *settings, "worker.actor.ppo_epochs=2", folder=tmp_path, prepare=watch)
    assert len(signals) == 4
    assert torch.equal(signals[0], signals[2])
    assert torch.equal(signals[1], signals[3])
    (row,) = finished.metrics
    assert row["work/teacher_rows"] <= 2 * 16


def test_the_full_kl_is_that_of_plain_transformers(
    build_actor: Any, tiny_model_folder: Path, tiny_processing: Any
) -> None:
    actor, model = build_actor(optim__lr=1e-2), reference_model(tiny_model_folder)
    actor.reference_weights = TeacherWeights(actor.module, TeacherConfig(source="reference"))
    context = encoded(tiny_processing, "Find x.", picture(1))
    rows = [ScoringRow(context=context, response_ids=random_response(n, n), row=n) for n in (4, 9)]
    mask = torch.arange(9).unsqueeze(0) < torch.tensor([[4], [9]])
    old_log_probs = torch.zeros(2, 9)
    old_log_probs[mask] = torch.cat(actor.score(rows))
    actor.score(rows, as_reference=True, keep_states=OWN_VIEW)
    assert torch.cat(actor.score(rows, result="reference_kl")).abs().max() < 1e-6
    batch = OptimizerBatch(
        rows=rows,
        old_log_probs=old_log_probs,
        advantages=mask.float(),
        response_mask=mask,
        denominators=LossDenominators(num_tokens=13, num_sequences=2, max_response_length=9),
    )
    actor.update([batch], step=0)
    measured = actor.score(rows, result="reference_kl")
    initial = [reference_logits(model, row, tiny_processing.image_token_id).log_softmax(dim=1) for row in rows]
    weights = {name.removeprefix("model."): value for name, value in parameters_of(actor).items()}
    model.load_state_dict(weights, strict=False)
    for row, values, before in zip(rows, measured, initial, strict=True):
        now = reference_logits(model, row, tiny_processing.image_token_id).log_softmax(dim=1)
        torch.testing.assert_close(values, (now.exp() * (now - before)).sum(dim=1), atol=1e-6, rtol=1e-4)
        assert float(values.min()) > 1e-6


@pytest.mark.parametrize("in_loss", [True, False])
def test_a_full_kl_trains_in_the_loss_and_in_the_reward(in_loss: bool, tiny_run: list[str], tmp_path: Path) -> None:
    settings = [
        "algorithm.disable_kl=false",
        "algorithm.kl_penalty=full",
        f"algorithm.use_kl_loss={str(in_loss).lower()}",
    ]
    finished = run(tiny_run, *settings, "algorithm.kl_coef=0.1", folder=tmp_path)
    first, second = (row for row in finished.metrics if "critic/kl" in row)
    assert first["critic/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["critic/kl"] > 1e-7
    assert ("actor/kl_loss" in second) is in_loss
