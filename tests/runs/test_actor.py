"""One scoring path held against plain transformers, updates that depend on rows and their signal alone, teachers, the critic."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from generator_cases import reference_model
from rounding import GRADIENTS, LOG_PROBS, ORDERS, moved_by_one_unit, one_unit_off
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import (
    BuildActor,
    batch_of,
    denominators_of,
    encoded,
    gradient_of,
    largest_gap,
    mask_of,
    padded,
    parameters_of,
    plain_inputs,
    reference_log_probs,
    reference_logits,
    relative_gap,
    rows_of,
    whole,
)

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.config.worker_schema import OptimConfig
from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
from cepo.errors import ConfigError
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_state, save_state
from cepo.workers.critic import Critic
from cepo.workers.distributed import process_group_backend
from cepo.workers.training import learning_rate_factor, move_state
from testing.rows import gradients_of

pytestmark = pytest.mark.heavy

ADVANTAGES = (1.0, -0.7, 0.4, -1.2, 0.9, -0.3)


def own_batch(actor: Actor, rows: Sequence[ScoringRow]) -> OptimizerBatch:
    """The six rows of the fixture `rows`, on the policy's own log-probs."""
    return batch_of(rows, ADVANTAGES, actor.score(rows))


@pytest.mark.nightly("measures what the tests take as given")
def test_the_bounds_on_rounding_are_what_is_measured_here(
    build_actor: BuildActor, tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    """`LOG_PROBS` and `GRADIENTS` of tests/rounding.py, within a factor: neither a processor's luck nor a loose guess."""
    model = reference_model(tiny_model_folder)
    moved = moved_by_one_unit(lambda: reference_log_probs(model, rows), model.parameters())
    assert LOG_PROBS / 4 < ORDERS * moved < 2 * LOG_PROBS
    actor = build_actor()
    batch = own_batch(actor, rows)
    plain = gradient_of(actor, batch)
    with one_unit_off([whole(parameter) for parameter in actor.module.parameters()]):
        assert GRADIENTS / 8 < ORDERS * relative_gap(gradient_of(actor, batch), plain) < 2 * GRADIENTS


def test_log_probs_and_entropies_are_plain_transformers(
    build_actor: BuildActor, tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    """One micro-batch has rows with 0, 1 and 2 images; the temperature is 0.7."""
    model = reference_model(tiny_model_folder)
    actor = build_actor(temperature=0.7)
    expected_scores = reference_log_probs(model, rows, temperature=0.7)
    scores = actor.score(rows)
    assert [len(score) for score in scores] == [9, 3, 17, 1, 6, 12]
    assert largest_gap(scores, expected_scores) < LOG_PROBS
    assert float(torch.cat(expected_scores).std()) > 0.5  # no flat distribution would tell apart right from wrong
    expected_entropies: list[Tensor] = []
    for row in rows:
        log_p = (reference_logits(model, row) / 0.7).log_softmax(dim=1)
        expected_entropies.append(-(log_p.exp() * log_p).sum(dim=1))
    assert largest_gap(actor.entropies(rows), expected_entropies) < LOG_PROBS


def test_gradients_are_those_of_plain_autograd(
    build_actor: BuildActor, tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    """`-sum_t A_t log P_t / tokens`, with an advantage for each token; the weights stay as they are."""
    mask = mask_of(rows)
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    batch = OptimizerBatch(
        rows=rows, sampled_log_probs=torch.zeros(mask.shape), advantages=advantages, response_mask=mask,
        denominators=denominators_of(mask),
    )  # fmt: skip
    actor = build_actor()
    model = reference_model(tiny_model_folder)
    weights_before = parameters_of(actor)
    gradients = dict(zip(weights_before, gradients_of(actor, batch), strict=True))
    assert differing(weights_before, parameters_of(actor)) == []
    model.requires_grad_(True)
    for log_probs, of_row in zip(reference_log_probs(model, rows), advantages, strict=True):
        weighted = of_row[: len(log_probs)] * log_probs
        (-weighted.sum() / mask.sum()).backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    flat_gradient = torch.cat([gradients[name].flatten() for name in gradients])
    flat_expected = torch.cat([expected[name].flatten() for name in gradients])
    assert relative_gap(flat_gradient, flat_expected) < 1e-5


@pytest.mark.parametrize("on_policy", [True, False])
def test_truncated_weights_scale_the_gradient(build_actor: BuildActor, rows: list[ScoringRow], on_policy: bool) -> None:
    """The engine's probabilities are half of the trainer's, so that all weights are 2, or 1.5 where this is the bound."""
    batch = own_batch(build_actor(), rows)
    half = batch.sampled_log_probs - math.log(2.0)
    old_log_probs = None if on_policy else batch.old_log_probs
    sampled = dataclasses.replace(batch, sampled_log_probs=half, old_log_probs=old_log_probs)

    def norm_with_threshold(threshold: float) -> float | None:
        actor = build_actor(rollout_is="truncate", rollout_is_threshold=threshold)
        return actor.update([sampled], step=0)["actor/grad_norm"].result

    plain_norm = build_actor().update([batch], step=0)["actor/grad_norm"].result
    assert norm_with_threshold(1.5) == pytest.approx(1.5 * plain_norm, rel=1e-4)
    assert norm_with_threshold(3.0) == pytest.approx(2 * plain_norm, rel=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_an_adapter_leaves_the_device_in_one_block(build_actor: BuildActor, rank: int) -> None:
    """It has 56 tensors here and 392 in Qwen3-VL-2B; each would be a copy that waits for the device."""
    actor = build_actor(model__lora__rank=rank)
    with torch.no_grad():
        for number, parameter in enumerate(actor.module.parameters()):
            if parameter.requires_grad:
                parameter.fill_(number)
    trained = parameters_of(actor)
    for _ in range(2):  # what the engine gets is a copy: the next adapter still has the trained values
        tensors = actor.rollout_weights().tensors
        assert (len(tensors), {min(tensor.shape) for tensor in tensors.values()}) == (56, {rank})
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
        for name, tensor in tensors.items():
            assert torch.equal(tensor, trained[f"model.{name.removesuffix('.weight')}.default.weight"])
            tensor.zero_()


class _Watch(TorchDispatchMode):
    """Counts products that are added to a tensor where it lies, and the most elements of any tensor made under it."""

    sums_in_place = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sums_in_place += func is torch.ops.aten.addmm_.default
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_adapted_layer_adds_its_adapter_in_place(
    build_actor: BuildActor, rows: list[ScoringRow], dtype: str
) -> None:
    """They do so under FSDP, in 16 bits too."""
    settings = {"fsdp__mp_param_dtype": dtype, "micro_batch_size_per_device_for_experience": 16}
    actor = build_actor(model__lora__rank=4, padding_free=False, **settings)
    assert actor.adapted_layers == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    layers = sum(name.endswith("lora_A.default.weight") for name, _ in actor.module.named_parameters())
    with _Watch() as seen:
        actor.score(rows)
    assert seen.sums_in_place == layers > 0


def test_no_tensor_of_rows_x_tokens_x_vocabulary_is_ever_made(
    build_actor: BuildActor, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = encoded(tiny_processing, "Find x.")
    many = rows_of([context], [40] * 16)
    actor = build_actor(
        micro_batch_size_per_device_for_update=16, micro_batch_size_per_device_for_experience=16, model__lora__rank=4
    )
    vocabulary = actor.module.base.lm_head.weight.shape[0]
    monkeypatch.setattr("cepo.models.head.HEAD_CHUNK_ELEMENTS", 8 * vocabulary)
    with _Watch() as seen:
        actor.update([batch_of(many, [1.0, -1.0] * 8, actor.score(many))], step=0)
    hidden = actor.module.base.config.text_config.intermediate_size
    assert 8 * vocabulary <= seen.largest <= 16 * (len(context.token_ids) + 40) * hidden < 16 * 40 * vocabulary


def test_an_optimizer_batch_without_live_rows_still_moves_adam(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor(optim__lr="1e-3")
    full = own_batch(actor, rows)
    empty = dataclasses.replace(
        full,
        rows=[],
        old_log_probs=full.old_log_probs[:0],
        advantages=full.advantages[:0],
        response_mask=full.response_mask[:0],
    )
    actor.update([full], step=0)
    weights_before = parameters_of(actor)
    metrics = actor.update([empty], step=1)
    assert metrics["actor/grad_norm"].result == 0
    weights_after = parameters_of(actor)
    name = next(name for name in weights_before if name.endswith("q_proj.weight"))
    assert not torch.equal(weights_before[name], weights_after[name])
    steps = {float(state["step"]) for state in actor.optimizer.state.values()}
    assert steps == {2.0}


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 2, "min_lr_ratio": 0.2}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr_scheduler_type": "linear", "lr_warmup_ratio": 1 / 6}, [1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        # Warm-up 1/2, 1; then floor 0.1 and the quarters of half a cosine: 1, (1 + cos 45)/2, 1/2, (1 - cos 45)/2, 0.
        (
            {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1},
            [0.5, 1, *(0.1 + 0.9 * quarter for quarter in (1, 0.8535533905932737, 0.5, 0.14644660940672627, 0))],
        ),
    ],
)  # fmt: skip
def test_rates_rise_and_fall_as_worked_out_by_hand(settings: dict[str, Any], factors: list[float]) -> None:
    optim = OptimConfig(lr=1e-3, **settings)
    assert [learning_rate_factor(step, optim, 6) for step in range(len(factors))] == pytest.approx(factors)


def test_offloading_on_a_cpu_does_nothing_and_is_reported_once(
    build_actor: BuildActor, tiny_processing: Processing, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of([encoded(tiny_processing, "Find x.")], [6])
    plain = build_actor()
    with caplog.at_level(logging.WARNING, logger="cepo.workers.training"):
        actor = build_actor(fsdp__enable_cpu_offload=True, offload__offload_params=True)
    (told,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert told == "fsdp.enable_cpu_offload and offload.* have no effect: the device is the CPU"
    actor.rest()
    assert torch.equal(plain.score(rows)[0], actor.score(rows)[0])


def test_moving_an_optimizers_state_takes_its_moments_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    move_state(optimizer, torch.device("meta"))
    devices = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_a_gpus_process_group_serves_host_memory_too() -> None:
    assert process_group_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert process_group_backend(torch.device("cpu")) == "gloo"


def one_step(actor: Actor, rows: list[ScoringRow], *, step: int) -> None:
    actor.update([own_batch(actor, rows)], step=step)
    actor.finish_step(step)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_a_snapshot_every_2_steps_is_the_actor_at_2_and_4(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    teacher = TeacherConfig(source="snapshot", sync_every=2)
    actor = build_actor(teacher=teacher, optim__lr="1e-3", fsdp__enable_full_shard=False)
    of_snapshot = actor.score(rows)
    for step in range(4):
        one_step(actor, rows, step=step)
        student = actor.score(rows)
        if (step + 1) % 2 == 0:
            of_snapshot = student
        assert equal(actor.score_teacher(rows), of_snapshot)
        assert equal(student, of_snapshot) == (step in (1, 3))


def test_a_pass_of_the_average_restores_the_students_bits(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor(teacher=TeacherConfig(source="ema", ema_decay=0.5), optim__lr="1e-3")
    one_step(actor, rows, step=0)
    live = parameters_of(actor)
    student = actor.score(rows)
    taught = actor.score_teacher(rows)
    assert differing(live, parameters_of(actor)) == []
    assert equal(actor.score(rows), student)
    twin = build_actor(optim__lr="1e-3")
    weights: dict[str, Any] = dict(twin.module.named_parameters())
    for name, average in actor.teacher_weights.copies.items():
        weights[name].data.copy_(average)
    assert largest_gap(twin.score(rows), taught) < LOG_PROBS
    assert largest_gap(student, taught) > 1e-3


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
    critic = build_critic(max_grad_norm=1e6)
    model = reference_model(tiny_model_folder)
    (weight,) = whole(critic.module.head.weight.detach())
    (bias,) = whole(critic.module.head.bias.detach())
    states: list[Tensor] = []
    for row in rows:
        hidden = model.model(**plain_inputs(model, row)).last_hidden_state[0]
        states.append(hidden[len(row.context.token_ids) - 1 : -1])
    values = critic.values(rows)
    assert [tuple(value.shape) for value in values] == [(9,), (3,), (17,), (1,), (6,), (12,)]
    assert largest_gap(values, [state @ weight + bias for state in states]) < LOG_PROBS
    assert 1e-3 < float(torch.cat(values).std()) < 0.1
    assert float(bias) == 0.0

    batch = critic_batch(rows, rising, values)
    errors = (batch.old_values - batch.returns)[batch.response_mask]
    gradient_of(critic, batch)
    gradients = {name: whole(weight.grad) for name, weight in critic.module.named_parameters()}
    expected_gradient = errors @ torch.cat(states) / 48
    assert float((gradients["head.weight"][0] - expected_gradient).abs().max()) < LOG_PROBS
    assert float(gradients["head.bias"]) == pytest.approx(float(errors.mean()), abs=LOG_PROBS)
    for name, gradient in gradients.items():
        assert "lm_head" not in name
        assert "bias" in name or gradient.any(), name


@pytest.mark.parametrize("kind", ["actor, token", "actor, seq", "critic"])
def test_gradient_loss_and_update_do_not_depend_on_micro_batches(
    kind: str, build_actor: BuildActor, build_critic: BuildCritic, rows: list[ScoringRow]
) -> None:
    """Actors' weights come within a thousandth of a step, which is at a learning rate of 1e-4; the critic's is 1e-3."""
    gradients = []
    weights = []
    losses = []
    for size in (6, 1, 4):
        if kind == "critic":
            worker: Any = build_critic(micro_batch_size_per_device_for_update=size)
            batch: Any = critic_batch(rows, rising, worker.values(rows))
        else:
            mode = kind.removeprefix("actor, ")
            worker = build_actor(micro_batch_size_per_device_for_update=size, loss_avg_mode=mode)
            batch = own_batch(worker, rows)
        gradients.append(gradient_of(worker, batch))
        metrics = worker.update([batch], step=0)
        losses.append(
            metrics["critic/vf_loss"].result if kind == "critic" else 0.0
        )  # actors' advantages cancel in theirs
        weights.append(torch.cat([weight.flatten() for weight in parameters_of(worker).values()]))
    assert float(gradients[0].norm()) > 1e-3
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for number in (1, 2):
        assert relative_gap(gradients[number], gradients[0]) < GRADIENTS
        # Adam divides tiny gradients by their own size, so a few entries may turn.
        moved_apart = float((weights[0] - weights[number]).abs().mean())
        assert moved_apart < (GRADIENTS if kind == "critic" else 1e-3 * 1e-4)


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
    metrics = [worker.update([batch], step=2) for worker in (critic, restored)]
    assert metrics[0] == metrics[1]
    assert differing(parameters_of(critic), parameters_of(restored)) == []
    assert largest_gap(critic.values(rows), restored.values(rows)) == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_body_in_bfloat16_leaves_head_and_values_in_float32(
    build_critic: BuildCritic, rows: list[ScoringRow], dtype: str
) -> None:
    critic = build_critic(fsdp__mp_param_dtype="bf16", fsdp__torch_dtype=dtype)
    values = critic.values(rows)
    assert largest_gap(values, (of_row.bfloat16().float() for of_row in values)) > 0
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
