"""The critic held against plain transformers, and updates that depend on nothing but the rows and their returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import reference_model
from rounding import GRADIENTS, LOG_PROBS
from torch import Tensor
from training_runs import (
    assert_cuts_change_nothing,
    denominators_of,
    differing,
    gradient_of,
    largest_gap,
    mask_of,
    padded,
    parameters_of,
    plain_inputs,
    whole,
)

from cepo.config import load_config
from cepo.data.batch import CriticBatch, ScoringRow
from cepo.errors import ConfigError
from cepo.models.processing import Processing
from cepo.workers.actor_critic import Critic
from cepo.workers.checkpoint import load_state, save_state

pytestmark = pytest.mark.heavy
BuildCritic = Callable[..., Critic]


@pytest.fixture
def build_critic(tiny_model_folder: Path, tiny_processing: Processing) -> BuildCritic:
    """Makes a critic on the tiny checkpoint in float32; keywords are settings of `worker.critic`, dots as `__`."""

    def build(*, seed: int = 1, **settings: Any) -> Critic:
        tree: dict[str, Any] = {"fsdp.mp_param_dtype": "fp32", "optim.lr": "1e-3"} | {
            name.replace("__", "."): value for name, value in settings.items()
        }
        arguments = [f"worker.critic.{name}={value}" for name, value in tree.items()]
        model = f"worker.actor.model.model_path={tiny_model_folder}"
        config = load_config(["config=configs/microgeo/base.yaml", model, *arguments])
        return Critic(config.worker.resolved_critic, tiny_processing, total_steps=10, seed=seed)

    return build


def critic_batch(
    rows: Sequence[ScoringRow],
    returns: Callable[[Tensor], Tensor],
    values: Sequence[Tensor],
    old_values: Callable[[Tensor], Tensor] = lambda value: value,
) -> CriticBatch:
    """Rows whose returns and old values are functions of what the critic says now."""
    mask = mask_of(rows)
    filled = padded(values, mask)
    return CriticBatch(
        rows=rows,
        old_values=old_values(filled).where(mask, 0.0),
        returns=returns(filled).where(mask, 0.0),
        response_mask=mask,
        denominators=denominators_of(mask),
    )


def rising(values: Tensor) -> Tensor:
    """Returns that differ from token to token and row to row, within the clip range of the old values or not."""
    return torch.linspace(-1.0, 1.0, values.numel()).reshape(values.shape)


def test_values_and_gradients_are_those_on_plain_hidden_states(
    build_critic: BuildCritic, tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    """The gradient reaches the whole body, and no head of the language model."""
    critic, model = build_critic(max_grad_norm=1e6), reference_model(tiny_model_folder)
    weight, bias = whole(critic.module.head.weight.detach()), whole(critic.module.head.bias.detach())
    passes = [model.model(**plain_inputs(model, row)).last_hidden_state[0] for row in rows]
    states = [each[len(row.context.token_ids) - 1 : -1] for each, row in zip(passes, rows, strict=True)]
    values = critic.values(rows)
    assert [tuple(value.shape) for value in values] == [(9,), (3,), (17,), (1,), (6,), (12,)]
    assert largest_gap(values, [state @ weight[0] + bias[0] for state in states]) < LOG_PROBS
    assert 1e-3 < float(torch.cat(values).std()) < 0.1
    assert float(bias) == 0.0
    batch = critic_batch(rows, rising, values)
    error = (batch.old_values - batch.returns)[batch.response_mask]
    gradient_of(critic, batch)
    found = {name: whole(weight.grad) for name, weight in critic.module.named_parameters()}
    assert float((found["head.weight"][0] - error @ torch.cat(states) / 48).abs().max()) < LOG_PROBS
    assert float(found["head.bias"]) == pytest.approx(float(error.mean()), abs=LOG_PROBS)
    assert [name for name, gradient in found.items() if not gradient.any() and "bias" not in name] == []
    assert not any("lm_head" in name for name in found)


def test_gradient_loss_and_update_do_not_depend_on_micro_batches(
    build_critic: BuildCritic, rows: list[ScoringRow]
) -> None:
    """The learning rate is 1e-3."""
    metrics = assert_cuts_change_nothing(
        build_critic, lambda critic: critic_batch(rows, rising, critic.values(rows)), moved_apart=GRADIENTS
    )
    losses = [each["critic/vf_loss"].result for each in metrics]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_clipped_value_gets_no_push_further_up(build_critic: BuildCritic, rows: list[ScoringRow]) -> None:
    """The value is 1 above its old one, and the loss that of half above."""
    critic = build_critic(cliprange_value=0.5)
    up = critic_batch(rows, lambda value: value + 1.0, critic.values(rows), lambda value: value - 1.0)
    metrics = critic.update([up], step=0)
    assert metrics["critic/vf_loss"].result == pytest.approx(1.5**2 / 2, rel=1e-5)
    assert metrics["critic/vf_clipfrac"].result == 1.0
    assert metrics["critic/grad_norm"].result == 0.0


def test_a_restored_critic_continues_with_the_same_bits(
    build_critic: BuildCritic, rows: list[ScoringRow], tmp_path: Path
) -> None:
    """It is saved after 2 updates."""
    settings = {"optim__lr_scheduler_type": "cosine", "optim__lr_warmup_steps": 1}
    critic = build_critic(**settings)
    batch = critic_batch(rows, rising, critic.values(rows))
    for step in range(2):
        critic.update([batch], step=step)
    save_state(critic, tmp_path / "critic")
    restored = build_critic(seed=2, **settings)
    load_state(restored, tmp_path / "critic")
    assert largest_gap(critic.values(rows), restored.values(rows)) == 0.0
    metrics = [each.update([batch], step=2) for each in (critic, restored)]
    assert metrics[0] == metrics[1]
    assert differing(parameters_of(critic), parameters_of(restored)) == []
    assert largest_gap(critic.values(rows), restored.values(rows)) == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_body_in_bfloat16_leaves_head_and_values_in_float32(
    build_critic: BuildCritic, rows: list[ScoringRow], dtype: str
) -> None:
    critic = build_critic(fsdp__mp_param_dtype="bf16", fsdp__torch_dtype=dtype)
    values = critic.values(rows)
    assert largest_gap(values, (each.bfloat16().float() for each in values)) > 0
    assert largest_gap(values, build_critic().values(rows)) < 0.02
    assert critic.update([critic_batch(rows, rising, values)], step=0)["critic/grad_norm"].result > 0.0
    assert values[0].dtype == critic.module.head.weight.dtype == torch.float32


def test_a_frozen_tower_of_a_critic_gets_no_gradient(build_critic: BuildCritic, rows: list[ScoringRow]) -> None:
    critic = build_critic(model__enable_gradient_checkpointing=True, model__freeze_vision_tower=True)
    tower = [weight for name, weight in critic.module.named_parameters() if "visual" in name]
    assert len(tower) > 10
    assert not any(weight.requires_grad for weight in tower)
    assert critic.update([critic_batch(rows, rising, critic.values(rows))], step=0)["critic/grad_norm"].result > 0
    assert all(weight.grad is None for weight in tower)


def test_a_critic_of_other_tokens_is_refused(build_critic: BuildCritic) -> None:
    for entry, words in (
        ("image_token_id", r"model_path=.* uses a different tokenizer than the actor"),
        ("no_such_entry", r"override_config\.no_such_entry"),
    ):
        with pytest.raises(ConfigError, match=rf"worker\.critic\.model\.{words}"):
            build_critic(model__override_config=f"{{{entry}: 3}}")
