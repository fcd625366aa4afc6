"""What an optimizer batch minimises, in numbers worked out by hand, and the settings it is made with."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from cepo.algorithms import registry as methods_registry
from cepo.config import check_config, load_config
from cepo.errors import ConfigError
from cepo.losses import registry as losses_registry
from cepo.losses.aggregation import LossDenominators
from cepo.losses.importance import agreement_metrics
from cepo.losses.objective import ObjectiveSettings, ObjectiveTerms, objective, step_metrics
from cepo.losses.settings import DualClipConfig, GateConfig
from cepo.metrics import merge_metrics, results
from cepo.types import DivergenceConfig
from cepo.workers.worker import KlInLoss, objective_settings

LOG2 = math.log(2)
MASK = torch.tensor([[True, True, False]])
WEIGHT = torch.tensor([[0.5, 0.25, 0.0]])


def terms(**others: Any) -> ObjectiveTerms:
    """Two response tokens of probability 1/2 and 1/4 under the old weights, with advantages 2 and -1."""
    return ObjectiveTerms(
        old_log_probs=torch.tensor([[-LOG2, -2 * LOG2, 0.0]]),
        advantages=torch.tensor([[2.0, -1.0, 0.0]]),
        response_mask=MASK,
        weight=WEIGHT,
        **others,
    )


def log_probs(*values: float) -> Tensor:
    return torch.tensor([[*values, 0.0]], requires_grad=True)


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    (gradients,) = torch.autograd.grad(loss, of)
    return gradients[0].tolist()


def test_a_sampled_kl_pulls_towards_the_reference() -> None:
    """KL is 2 log 2 at the first token and 0 at the second."""
    policy = log_probs(-LOG2, -2 * LOG2)
    with_reference = terms(reference_log_probs=torch.tensor([[-3 * LOG2, -2 * LOG2, 0.0]]))
    settings = ObjectiveSettings(kl_penalty="kl", kl_coefficient=0.2)
    loss, metrics = objective(policy, with_reference, settings)
    assert loss.item() == pytest.approx(-0.75 + 0.2 * 0.5 * 2 * LOG2)
    assert metrics["actor/kl_loss"].result == pytest.approx(LOG2)
    assert gradient(loss, policy) == pytest.approx([-1.0 + 0.2 * 0.5, 0.25 + 0.2 * 0.25, 0.0])

    without_kl = ObjectiveSettings(kl_coefficient=0.0)
    loss, metrics = objective(policy, with_reference, without_kl)
    assert loss.item() == pytest.approx(-0.75)
    assert "actor/kl_loss" not in metrics


def test_a_divergence_is_added_with_weight_and_importance() -> None:
    """P / P_old is 2 at the first token, bounded by 1.5, and 1 at the second."""
    divergence = torch.tensor([[0.3, 0.7, 5.0]], requires_grad=True)
    loss, metrics = objective(
        log_probs(0.0, -2 * LOG2),
        terms(divergence_weight=torch.tensor([[2.0, 1.0, 0.0]])),
        ObjectiveSettings(),
        teacher_divergence=divergence,
        divergence_settings=DivergenceConfig(kind="jsd", importance_clip=1.5),
    )
    policy_loss = 0.5 * -2 * 1.28 + 0.25 * 1
    distillation_loss = 0.5 * 2 * 0.3 * 1.5 + 0.25 * 1 * 0.7
    assert loss.item() == pytest.approx(policy_loss + distillation_loss)
    assert metrics["actor/distillation_loss"].value == pytest.approx(distillation_loss)
    assert gradient(loss, divergence) == pytest.approx([1.5, 0.25, 0.0])


def test_losses_and_clip_fractions_are_over_optimizer_steps() -> None:
    """Two steps: one of two micro-batches among 8 tokens, and one among 4 tokens none of whose rows has a gradient.

    The ratios are 2, which is clipped, and 3.5 with A = -1, beyond the dual bound 3. Of the entropy the four live tokens
    alone are known.
    """
    settings = ObjectiveSettings()
    policy = log_probs(0.0, math.log(7 / 8))
    _, of_micro_batch = objective(policy, terms(), settings)
    first_step = step_metrics(settings, LossDenominators(8, 4, 10), distils=False)
    second_step = step_metrics(settings, LossDenominators(4, 4, 10), distils=False)
    metrics = results(merge_metrics([of_micro_batch, of_micro_batch, first_step, second_step]))
    loss = 0.5 * -2 * 1.28 + 0.25 * 3
    assert metrics["actor/pg_loss"] == pytest.approx(2 * loss / 2)
    assert metrics["actor/pg_clipfrac_higher"] == pytest.approx(2 / 12)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(2 / 12)
    assert metrics["actor/live_entropy"] == pytest.approx(-math.log(7 / 8) / 2)


BASE = "config=configs/microgeo/base.yaml"


def settings_of_run(*arguments: str) -> ObjectiveSettings:
    config = load_config([BASE, *arguments])
    return objective_settings(config.worker.actor, KlInLoss.of(config.algorithm))


def test_the_configured_bounds_reach_the_loss_in_their_places() -> None:
    clip_bounds = [
        "worker.actor.clip_ratio_low=0.11",
        "worker.actor.clip_ratio_high=0.37",
        "worker.actor.clip_ratio_dual=5.5",
    ]
    clipped = settings_of_run("worker.actor.loss_type=gspo", *clip_bounds)
    assert clipped.loss.config == DualClipConfig(clip_ratio_low=0.11, clip_ratio_high=0.37, clip_ratio_dual=5.5)
    gates = ["worker.actor.tau_positive=1.2", "worker.actor.tau_negative=1.7"]
    gated = settings_of_run("worker.actor.loss_type=sapo", *clip_bounds, *gates)
    assert gated.loss.name == "sapo"
    assert gated.loss.config == GateConfig(tau_positive=1.2, tau_negative=1.7)


def test_the_configured_kl_and_importance_reach_the_objective() -> None:
    settings = settings_of_run(
        "worker.actor.rollout_is=mask",
        "worker.actor.rollout_is_threshold=3",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=mse",
        "algorithm.kl_coef=0.03",
    )
    assert settings == ObjectiveSettings(
        loss=settings.loss,
        rollout_is="mask",
        rollout_is_threshold=3.0,
        kl_penalty="mse",
        kl_coefficient=0.03,
    )


def test_importance_needs_the_engines_log_probs_at_temperature_1() -> None:
    config = load_config([BASE, "worker.actor.rollout_is=mask", "worker.rollout.temperature=0.8"])
    with pytest.raises(ConfigError, match="at temperature 1 and cannot be compared"):
        check_config(config)


@pytest.mark.parametrize(("disabled", "in_loss"), [("true", "true"), ("true", "false"), ("false", "false")])
def test_a_kl_that_is_off_or_in_the_reward_adds_no_loss(disabled: str, in_loss: str) -> None:
    settings = settings_of_run(
        f"algorithm.disable_kl={disabled}", f"algorithm.use_kl_loss={in_loss}", "algorithm.kl_coef=0.5"
    )
    assert settings.kl_coefficient == 0.0


@pytest.mark.parametrize(
    ("kind", "threshold", "weights"),
    [
        ("none", 1.5, (1.0, 1.0)),
        ("truncate", 1.5, (1.5, 0.5)),
        ("mask", 1.5, (0.0, 0.0)),  # below, the bound is 2 / 3
        ("mask", 2.0, (0.0, 0.5)),
        ("mask", 4.0, (4.0, 0.5)),
    ],
)
def test_tokens_weigh_what_trainer_and_engine_disagree_about(
    kind: str, threshold: float, weights: tuple[float, float]
) -> None:
    """The trainer's probability is 4 times, and half of, the engine's."""
    first, second = weights
    settings = ObjectiveSettings(rollout_is=kind, rollout_is_threshold=threshold)
    policy = log_probs(-LOG2, -2 * LOG2)
    sampled = torch.tensor([[-3 * LOG2, -LOG2, 0.0]])
    loss, metrics = objective(policy, terms(sampled_log_probs=sampled), settings)
    assert loss.item() == pytest.approx(0.5 * -2 * first + 0.25 * second)
    assert gradient(loss, policy) == pytest.approx([-first, 0.25 * second, 0.0])
    if kind == "none":
        assert "rollout/is_weight" not in metrics
    else:
        assert metrics["rollout/is_weight"].result == pytest.approx((first + second) / 2)


def test_the_defaults_of_losses_are_those_of_the_configuration() -> None:
    config = load_config(["data.train_files=some", "worker.actor.model.model_path=some"])
    configured = objective_settings(config.worker.actor, KlInLoss.of(config.algorithm))
    default = ObjectiveSettings()
    assert configured.loss.name == default.loss.name
    assert configured.loss.config == default.loss.config
    assert configured == dataclasses.replace(
        default,
        loss=configured.loss,
        kl_penalty=configured.kl_penalty,
        kl_coefficient=configured.kl_coefficient,
    )


def test_the_engines_kl_is_rho_less_1_less_log_rho() -> None:
    """Probabilities of 1/2 and 1/4 by the trainer, of 1/8 and 1/2 by the engine: (3 - log 4 - 1/2 + log 2) / 2."""
    scored = torch.tensor([[-LOG2, -2 * LOG2, 0.0]])
    sampled = torch.tensor([[-3 * LOG2, -LOG2, 0.0]])
    metrics = results(agreement_metrics(sampled, scored, MASK, 1.0))
    assert metrics["rollout/kl"] == pytest.approx((3 - 2 * LOG2 - 0.5 + LOG2) / 2)


def test_a_worker_process_loads_the_plugin_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ray the settings come from another process, which has loaded the file."""
    config = load_config(["config=examples/custom_loss/my_loss.yaml"])
    actor = pickle.loads(pickle.dumps(config.worker.actor))
    kl = KlInLoss.of(config.algorithm)
    losses_of_another_process = dict(losses_registry.LOSSES.classes)
    del losses_of_another_process["my_loss"]
    monkeypatch.setattr(losses_registry.LOSSES, "classes", losses_of_another_process)
    monkeypatch.setattr(methods_registry, "_plugins", {})
    with pytest.raises(ConfigError, match="'my_loss' is unknown"):
        objective_settings(actor, kl)
    settings = objective_settings(actor, kl, plugins=config.trainer.plugins)
    assert settings.loss.name == "my_loss"
    assert settings.loss.config.radius == 0.1
