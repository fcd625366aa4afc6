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
    (found,) = torch.autograd.grad(loss, of)
    return found[0].tolist()


def test_a_sampled_kl_pulls_towards_the_reference() -> None:
    settings = ObjectiveSettings(kl_penalty="kl", kl_coefficient=0.2)
    now, given = log_probs(-LOG2, -2 * LOG2), terms(reference_log_probs=torch.tensor([[-3 * LOG2, -2 * LOG2, 0.0]]))
    loss, metrics = objective(now, given, settings)
    # KL is 2 log 2 at the first token and 0 at the second.
    assert loss.item() == pytest.approx(-0.75 + 0.2 * 0.5 * 2 * LOG2)
    assert metrics["actor/kl_loss"].result == pytest.approx(LOG2)
    assert gradient(loss, now) == pytest.approx([-1.0 + 0.2 * 0.5, 0.25 + 0.2 * 0.25, 0.0])
    in_reward, metrics = objective(now, given, ObjectiveSettings(kl_coefficient=0.0))
    assert in_reward.item() == pytest.approx(-0.75)
    assert "actor/kl_loss" not in metrics


def test_a_divergence_is_added_with_weight_and_importance() -> None:
    given = torch.tensor([[0.3, 0.7, 5.0]], requires_grad=True)
    # P / P_old is 2 at the first token, bounded by 1.5, and 1 at the second.
    loss, metrics = objective(
        log_probs(0.0, -2 * LOG2),
        terms(divergence_weight=torch.tensor([[2.0, 1.0, 0.0]])),
        ObjectiveSettings(),
        teacher_divergence=given,
        divergence_settings=DivergenceConfig(kind="jsd", importance_clip=1.5),
    )
    distilled = 0.5 * 2 * 0.3 * 1.5 + 0.25 * 1 * 0.7
    assert loss.item() == pytest.approx(0.5 * -2 * 1.28 + 0.25 * 1 + distilled)
    assert metrics["actor/distillation_loss"].value == pytest.approx(distilled)
    assert gradient(loss, given) == pytest.approx([1.5, 0.25, 0.0])


def test_losses_and_clip_fractions_are_over_optimizer_steps() -> None:
    # Two steps: one of two micro-batches among 8 tokens, and one among 4 tokens none of whose rows has a gradient.
    now = log_probs(0.0, math.log(7 / 8))  # ratio 2, clipped, and 3.5 with A = -1, beyond the dual bound 3
    parts = [objective(now, terms(), ObjectiveSettings())[1] for _ in range(2)]
    steps = [step_metrics(ObjectiveSettings(), LossDenominators(number, 4, 10), distils=False) for number in (8, 4)]
    found = results(merge_metrics([*parts, *steps]))
    loss = 0.5 * -2 * 1.28 + 0.25 * 3
    assert found["actor/pg_loss"] == pytest.approx(2 * loss / 2)
    assert found["actor/pg_clipfrac_higher"] == found["actor/pg_clipfrac_lower"] == pytest.approx(2 / 12)
    # Of the four live tokens alone: nothing is known of the others.
    assert found["actor/live_entropy"] == pytest.approx(-math.log(7 / 8) / 2)


BASE = "config=configs/microgeo/base.yaml"


def test_the_configured_bounds_reach_the_loss_in_their_places() -> None:
    actor = {"clip_ratio_low": 0.11, "clip_ratio_high": 0.37, "clip_ratio_dual": 5.5, "rollout_is": "mask"}
    actor |= {"loss_type": "sapo", "tau_positive": 1.2, "tau_negative": 1.7, "rollout_is_threshold": 3}
    kl = {"disable_kl": "false", "use_kl_loss": "true", "kl_penalty": "mse", "kl_coef": 0.03}
    overrides = [f"worker.actor.{name}={value}" for name, value in actor.items()]
    config = load_config([BASE, *overrides, *(f"algorithm.{name}={value}" for name, value in kl.items())])
    settings = objective_settings(config.worker.actor, KlInLoss.of(config.algorithm))
    assert (settings.loss.name, settings.loss.config) == ("sapo", GateConfig(tau_positive=1.2, tau_negative=1.7))
    bounds = DualClipConfig(clip_ratio_low=0.11, clip_ratio_high=0.37, clip_ratio_dual=5.5)
    clipped = dataclasses.replace(config.worker.actor, loss_type="gspo")
    assert objective_settings(clipped, KlInLoss.of(config.algorithm)).loss.config == bounds
    assert settings == ObjectiveSettings(
        loss=settings.loss,
        rollout_is="mask",
        rollout_is_threshold=3.0,
        kl_penalty="mse",
        kl_coefficient=0.03,
    )
    with pytest.raises(ConfigError, match="at temperature 1 and cannot be compared"):
        check_config(load_config([BASE, *overrides, "worker.rollout.temperature=0.8"]))


@pytest.mark.parametrize(("disabled", "in_loss"), [("true", "true"), ("true", "false"), ("false", "false")])
def test_a_kl_that_is_off_or_in_the_reward_adds_no_loss(disabled: str, in_loss: str) -> None:
    kl = [f"algorithm.disable_kl={disabled}", f"algorithm.use_kl_loss={in_loss}", "algorithm.kl_coef=0.5"]
    config = load_config([BASE, *kl])
    assert objective_settings(config.worker.actor, KlInLoss.of(config.algorithm)).kl_coefficient == 0.0


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
    settings = ObjectiveSettings(rollout_is=kind, rollout_is_threshold=threshold)
    now, sampled = log_probs(-LOG2, -2 * LOG2), torch.tensor([[-3 * LOG2, -LOG2, 0.0]])
    loss, metrics = objective(now, terms(sampled_log_probs=sampled), settings)
    assert loss.item() == pytest.approx(0.5 * -2 * weights[0] + 0.25 * weights[1])
    assert gradient(loss, now) == pytest.approx([-1.0 * weights[0], 0.25 * weights[1], 0.0])
    found = metrics.get("rollout/is_weight")
    assert (None if found is None else found.result) == (None if kind == "none" else pytest.approx(sum(weights) / 2))


def test_the_defaults_of_losses_are_those_of_the_configuration() -> None:
    config = load_config(["data.train_files=some", "worker.actor.model.model_path=some"])
    found = objective_settings(config.worker.actor, KlInLoss.of(config.algorithm))
    default = ObjectiveSettings().loss
    assert (found.loss.name, found.loss.config) == (default.name, default.config)
    assert found == ObjectiveSettings(loss=found.loss, kl_penalty=found.kl_penalty, kl_coefficient=found.kl_coefficient)


def test_the_engines_kl_is_rho_less_1_less_log_rho() -> None:
    """Probabilities of 1/2 and 1/4 by the trainer, of 1/8 and 1/2 by the engine: (3 - log 4 - 1/2 + log 2) / 2."""
    scored, sampled = torch.tensor([[-LOG2, -2 * LOG2, 0.0]]), torch.tensor([[-3 * LOG2, -LOG2, 0.0]])
    found = results(agreement_metrics(sampled, scored, MASK, 1.0))
    assert found["rollout/kl"] == pytest.approx((3 - 2 * LOG2 - 0.5 + LOG2) / 2)


def test_a_worker_process_loads_the_plugin_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ray the settings come from another process, which has loaded the file."""
    config = load_config(["config=examples/custom_loss/my_loss.yaml"])
    actor, algorithm = pickle.loads(pickle.dumps((config.worker.actor, config.algorithm)))
    without = {name: loss for name, loss in losses_registry.LOSSES.classes.items() if name != "my_loss"}
    monkeypatch.setattr(losses_registry.LOSSES, "classes", without)
    monkeypatch.setattr(methods_registry, "_plugins", {})
    with pytest.raises(ConfigError, match="'my_loss' is unknown"):
        objective_settings(actor, KlInLoss.of(algorithm))
    settings = objective_settings(actor, KlInLoss.of(algorithm), plugins=config.trainer.plugins)
    assert (settings.loss.name, settings.loss.config.radius) == ("my_loss", 0.1)
