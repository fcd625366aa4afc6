"""One scoring path held against plain transformers, and updates that depend on nothing but the rows and their signal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import GRADIENTS, LOG_PROBS, ORDERS, moved_by_one_unit, one_unit_off
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import (
    differing,
    encoded,
    largest_gap,
    parameters_of,
    picture,
    random_response,
    reference_log_probs,
    reference_logits,
    reference_model,
    whole,
)

from cepo.config.schema import OptimConfig
from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.losses.policy import LossDenominators
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights
from cepo.workers.actor import Actor
from cepo.workers.optimizing import learning_rate_factor

pytestmark = pytest.mark.heavy
BuildActor = Callable[..., Actor]


@pytest.fixture
def rows(tiny_processing: Processing) -> list[ScoringRow]:
    """Two responses each behind no picture, one, and two of other sizes; lengths 1 to 17."""
    contexts = [
        encoded(tiny_processing, "What is 2 + 3?"),
        encoded(tiny_processing, "Find x of this figure, please.", picture(1)),
        encoded(tiny_processing, "Which is larger?", picture(2, (96, 64)), picture(3, (128, 96))),
    ]
    lengths = (9, 3, 17, 1, 6, 12)
    return [
        ScoringRow(context=contexts[number // 2], response_ids=random_response(length, seed=number))
        for number, length in enumerate(lengths)
    ]


def optimizer_batch(actor: Actor, rows: Sequence[ScoringRow], advantages: Sequence[float]) -> OptimizerBatch:
    """Rows with one advantage each, on the policy's own log-probs."""
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
    old_log_probs = torch.zeros(mask.shape)
    old_log_probs[mask] = torch.cat(actor.score(rows))
    return OptimizerBatch(
        rows=rows,
        old_log_probs=old_log_probs,
        advantages=torch.tensor(advantages).unsqueeze(1).expand(mask.shape).where(mask, 0.0),
        response_mask=mask,
        denominators=LossDenominators(int(lengths.sum()), len(rows), 20),
    )


ADVANTAGES = (1.0, -0.7, 0.4, -1.2, 0.9, -0.3)


def gradients(actor: Actor, batch: OptimizerBatch) -> dict[str, Tensor]:
    """The clipped gradient of one optimizer step that moves nothing."""
    for group in actor.optimizer.param_groups:
        group["lr"] = 0.0
    actor._optimizer_step(batch)
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in actor.module.named_parameters()
        if parameter.grad is not None
    }


def relative_gap(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference, as a share of the whole gradient's length."""
    assert left.keys() == right.keys()
    length = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in left.values()))
    return largest_gap(left.values(), right.values()) / length


@pytest.mark.nightly("measures what the tests take as given")
def test_the_bounds_on_rounding_are_what_is_measured_here(
    build_actor: BuildActor, tiny_model_folder: Path, tiny_processing: Processing, rows: list[ScoringRow]
) -> None:
    """`LOG_PROBS` and `GRADIENTS` of tests/rounding.py, within a factor: neither a processor's luck nor a loose guess."""
    model, image_token = reference_model(tiny_model_folder), tiny_processing.image_token_id
    assert image_token is not None
    moved = moved_by_one_unit(
        lambda: [reference_log_probs(model, row, image_token) for row in rows], model.parameters()
    )
    assert LOG_PROBS / 4 < ORDERS * moved < 2 * LOG_PROBS
    actor = build_actor()
    batch = optimizer_batch(actor, rows, ADVANTAGES)
    plain = gradients(actor, batch)
    with one_unit_off([whole(parameter) for parameter in actor.module.parameters()]):
        other = gradients(actor, batch)
    difference = math.sqrt(sum(float((plain[name] - other[name]).double().square().sum()) for name in plain))
    length = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in plain.values()))
    assert GRADIENTS / 8 < ORDERS * difference / length < 2 * GRADIENTS


@pytest.mark.parametrize("temperature", [0.7])
def test_log_probs_are_plain_transformers(
    build_actor: BuildActor,
    tiny_model_folder: Path,
    tiny_processing: Processing,
    rows: list[ScoringRow],
    temperature: float,
) -> None:
    """One micro-batch has rows with 0, 1 and 2 images."""
    model = reference_model(tiny_model_folder)
    image_token = tiny_processing.image_token_id
    assert image_token is not None
    expected = [reference_log_probs(model, row, image_token, temperature=temperature) for row in rows]
    scores = build_actor(temperature=temperature).score(rows)
    assert [len(score) for score in scores] == [9, 3, 17, 1, 6, 12]
    assert largest_gap(scores, expected) < LOG_PROBS
    assert float(torch.cat(expected).std()) > 0.5  # no flat distribution would tell apart right from wrong


@pytest.mark.parametrize("temperature", [0.7])
def test_entropies_are_those_of_plain_transformers_logits(
    build_actor: BuildActor,
    tiny_model_folder: Path,
    tiny_processing: Processing,
    rows: list[ScoringRow],
    temperature: float,
) -> None:
    model, image_token = reference_model(tiny_model_folder), tiny_processing.image_token_id
    found = build_actor(temperature=temperature).score(rows, result="entropy")
    for row, entropy in zip(rows, found, strict=True):
        log_probs = (reference_logits(model, row, image_token) / temperature).log_softmax(dim=1)
        torch.testing.assert_close(entropy, -(log_probs.exp() * log_probs).sum(dim=1), atol=LOG_PROBS, rtol=0)


@pytest.mark.parametrize("on_policy", [True, False])
def test_truncated_weights_scale_the_gradient(build_actor: BuildActor, rows: list[ScoringRow], on_policy: bool) -> None:
    """The engine's probabilities are half of the trainer's, so that all weights are 2, or 1.5 where this is the bound."""
    batch = optimizer_batch(build_actor(), rows, ADVANTAGES)
    half = batch.old_log_probs - math.log(2.0)
    engine = {"old_log_probs": half} if on_policy else {"sampled_log_probs": half}
    sampled = dataclasses.replace(batch, on_policy=on_policy, **engine)
    lengths = {}
    for threshold in (1.5, 3.0):
        actor = build_actor(rollout_is="truncate", rollout_is_threshold=threshold)
        lengths[threshold] = actor.update([sampled], step=0)["actor/grad_norm"].result
    plain = build_actor().update([batch], step=0)["actor/grad_norm"].result
    assert lengths == pytest.approx({1.5: 1.5 * plain, 3.0: 2 * plain}, rel=1e-4)


@pytest.mark.parametrize("loss_avg_mode", ["token", "seq"])
def test_gradient_and_update_do_not_depend_on_micro_batches(
    build_actor: BuildActor, rows: list[ScoringRow], loss_avg_mode: str
) -> None:
    found, weights = [], []
    for size in (6, 1, 4):
        actor = build_actor(micro_batch_size_per_device_for_update=size, loss_avg_mode=loss_avg_mode)
        batch = optimizer_batch(actor, rows, ADVANTAGES)
        found.append(gradients(actor, batch))
        actor.update([batch], step=0)
        weights.append(parameters_of(actor))
    assert math.sqrt(sum(float(tensor.square().sum()) for tensor in found[0].values())) > 1e-3
    for other in (1, 2):
        assert relative_gap(found[0], found[other]) < GRADIENTS
        # Adam divides tiny gradients by their own size, so a few entries may turn; the learning rate is 1e-4.
        moved = torch.cat([(weights[0][name] - weights[other][name]).abs().flatten() for name in weights[0]])
        assert float(moved.mean()) < 1e-3 * 1e-4  # a thousandth of a step


def test_gradient_checkpointing_changes_no_gradient(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    for rank in (0, 4):
        found = []
        for on in (False, True):
            actor = build_actor(model__enable_gradient_checkpointing=on, model__lora__rank=rank)
            found.append(gradients(actor, optimizer_batch(actor, rows, ADVANTAGES)))
        assert relative_gap(*found) < GRADIENTS


def test_an_adapter_of_rank_1_is_trained_and_served(build_actor: BuildActor) -> None:
    weights = build_actor(model__lora__rank=1).rollout_weights()
    assert isinstance(weights, AdapterWeights)
    assert {min(tensor.shape) for tensor in weights.tensors.values()} == {1}


def test_an_adapter_is_handed_on_as_a_copy(build_actor: BuildActor, tmp_path: Path) -> None:
    actor = build_actor(model__lora__rank=4)
    with torch.no_grad():
        for number, parameter in enumerate(actor.module.parameters()):
            if parameter.requires_grad:
                parameter.fill_(number)
    weights = actor.rollout_weights()
    assert isinstance(weights, AdapterWeights)
    assert len(weights.tensors) == 56
    trained = dict(actor.module.named_parameters())
    for name, tensor in weights.tensors.items():
        own: Any = trained[f"model.{name.removesuffix('.weight')}.default.weight"]
        assert torch.equal(tensor, own.full_tensor() if hasattr(own, "full_tensor") else own)
        tensor.zero_()  # a copy: the next adapter still has the trained values
    weights = actor.rollout_weights()
    assert all(tensor.any() for tensor in weights.tensors.values())
    weights.write(tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == weights.tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.tensors.items())


class _SumsInPlace(TorchDispatchMode):
    """Counts products that are added to a tensor where it lies."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_adapted_layer_adds_its_adapter_in_place(
    build_actor: BuildActor, rows: list[ScoringRow], dtype: str
) -> None:
    """They do so under FSDP, in 16 bits too."""
    actor = build_actor(
        model__lora__rank=4,
        fsdp__mp_param_dtype=dtype,
        padding_free=False,
        micro_batch_size_per_device_for_experience=16,
    )
    layers = sum(name.endswith("lora_A.default.weight") for name, _ in actor.module.named_parameters())
    with _SumsInPlace() as seen:
        actor.score(rows)
    assert seen.count == layers > 0


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of any tensor made under it."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return result


def test_no_tensor_of_rows_x_tokens_x_vocabulary_is_ever_made(
    build_actor: BuildActor, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = encoded(tiny_processing, "Find x.")
    many = [ScoringRow(context=context, response_ids=random_response(40, seed=seed)) for seed in range(16)]
    actor = build_actor(
        micro_batch_size_per_device_for_update=16, micro_batch_size_per_device_for_experience=16, model__lora__rank=4
    )
    vocabulary = actor.module.base.lm_head.weight.shape[0]
    monkeypatch.setattr("cepo.models.head.HEAD_CHUNK_ELEMENTS", 8 * vocabulary)
    with _LargestTensor() as seen:
        actor.update([optimizer_batch(actor, many, [(-1.0) ** seed for seed in range(16)])], step=0)
    hidden = actor.module.base.config.text_config.intermediate_size
    length = len(context.token_ids) + 40
    logits = 16 * 40 * vocabulary
    assert 8 * vocabulary <= seen.largest <= 16 * length * hidden
    assert seen.largest < logits


def test_a_step_without_a_finite_gradient_is_skipped(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor()
    good = optimizer_batch(actor, rows, ADVANTAGES)
    before = parameters_of(actor)
    bad = dataclasses.replace(good, advantages=good.advantages.where(good.advantages != 1.0, math.inf))
    metrics = actor.update([bad], step=0)
    assert metrics["actor/skipped_updates"].result == 1
    assert "actor/grad_norm" not in metrics
    assert differing(before, parameters_of(actor)) == []
    assert not actor.optimizer.state  # nothing was recorded of it
    twin = build_actor()
    for each in (actor, twin):
        assert each.update([good], step=0)["actor/skipped_updates"].result == 0
    assert differing(parameters_of(twin), parameters_of(actor)) == []
    assert differing(before, parameters_of(actor)) != []


def test_an_optimizer_batch_without_live_rows_still_moves_adam(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor(optim__lr="1e-3")
    full = optimizer_batch(actor, rows, ADVANTAGES)
    empty = dataclasses.replace(full, rows=[], **{
        name: getattr(full, name)[:0] for name in ("old_log_probs", "advantages", "response_mask")
    })  # fmt: skip
    actor.update([full], step=0)
    before = parameters_of(actor)
    metrics = actor.update([empty], step=1)
    assert metrics["actor/grad_norm"].result == 0
    after = parameters_of(actor)
    name = next(name for name in before if name.endswith("q_proj.weight"))
    assert not torch.equal(before[name], after[name])
    steps = {float(state["step"]) for state in actor.optimizer.state.values()}
    assert steps == {2.0}


def test_linear_falls_in_equal_steps_to_its_floor() -> None:
    optim = OptimConfig(lr=1e-3, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    factors = [learning_rate_factor(step, optim, 6) for step in range(8)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    to_zero = OptimConfig(lr=1e-3, lr_scheduler_type="linear", lr_warmup_ratio=0.25)
    assert [learning_rate_factor(step, to_zero, 4) for step in range(5)] == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3, 0.0])


def test_freed_gradients_change_no_bit_of_the_next_ones(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    freeing, keeping = build_actor(optim__lr="1e-3"), build_actor(optim__lr="1e-3")
    batch = optimizer_batch(freeing, rows, ADVANTAGES)
    for step in range(3):
        freeing.update([batch], step=step)
        keeping.update([batch], step=step)
        freeing.forget_gradients()
        assert all(parameter.grad is None for parameter in freeing.module.parameters())
    assert any(parameter.grad is not None for parameter in keeping.module.parameters())
    assert differing(parameters_of(keeping), parameters_of(freeing)) == []


def test_the_cosine_gives_the_values_worked_out_by_hand(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    optim = OptimConfig(lr=1e-3, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    factors = [learning_rate_factor(step, optim, 6) for step in range(7)]
    # Warm-up 1/2, 1; then floor 0.1 and the quarters of half a cosine: 1, (1 + cos 45)/2, 1/2, (1 - cos 45)/2, 0.
    quarters = [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]
    assert factors == pytest.approx([0.5, 1.0, *[0.1 + 0.9 * quarter for quarter in quarters]][:7])
    actor = build_actor(optim__lr="1e-3", optim__lr_scheduler_type="cosine", optim__lr_warmup_steps=5)
    before = parameters_of(actor)
    metrics = actor.update([optimizer_batch(actor, rows, ADVANTAGES)], step=0)
    assert metrics["actor/lr"].result == pytest.approx(2e-4)  # the first step trains, at a fifth of the peak
    largest = largest_gap(before.values(), parameters_of(actor).values())
    assert 1.5e-4 < largest < 2.5e-4  # Adam's first step is the learning rate, plus decay
