"""Packed rows against padded rows: the same log-probs, gradients and values from fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rounding import GRADIENTS, LOG_PROBS
from torch import Tensor
from training_runs import encoded, largest_gap, picture, random_response, whole

from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.losses.policy import LossDenominators
from cepo.models.inputs import EncodedPrompt, ImageInputs
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.passes import collate_packed, forest_of

BuildActor = Callable[..., Actor]
HINTS = ("", "\nHere is a sample answer: 3", "\nHere is a sample answer: 47 degrees")


def contexts_of(
    processing: Processing, question: str, images: ImageInputs | None, num_contexts: int
) -> list[EncodedPrompt]:
    marks = "<image>" * (0 if images is None else len(images.grid_thw))
    return [processing.encode(marks + question + hint, images) for hint in HINTS[:num_contexts]]


def group(
    processing: Processing, question: str, pictures: Sequence[Any], *, num_contexts: int, size: int, seed: int
) -> list[ScoringRow]:
    """Each of `size` ragged responses behind each context."""
    images = processing.load_images(list(pictures))
    lengths = torch.randint(1, 40, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        ScoringRow(context=context, response_ids=random_response(length, seed=100 * seed + number))
        for context in contexts_of(processing, question, images, num_contexts)
        for number, length in enumerate(lengths)
    ]


def mixed_rows(processing: Processing, *, num_contexts: int, size: int) -> list[ScoringRow]:
    """Groups with no picture, one, two of other sizes, and one with another picture under the same words."""
    question = "Find x in this figure, please, and say why."
    return [
        *group(processing, "What is 2 + 3, and why is it not 6?", [], num_contexts=num_contexts, size=size, seed=1),
        *group(processing, question, [picture(1)], num_contexts=num_contexts, size=size, seed=2),
        *group(processing, question, [picture(2)], num_contexts=num_contexts, size=size, seed=3),
        *group(processing, question, [picture(3, (96, 64)), picture(4, (128, 96))],
               num_contexts=num_contexts, size=size, seed=4),
    ]  # fmt: skip


def both(build_actor: BuildActor, **settings: Any) -> tuple[Actor, Actor]:
    return build_actor(**settings), build_actor(padding_free="false", **settings)


@pytest.mark.heavy
@pytest.mark.parametrize(("num_contexts", "size"), [(1, 16), (3, 5)])
def test_packed_log_probs_are_the_padded_ones_to_1e_minus_5(
    build_actor: BuildActor, tiny_processing: Processing, num_contexts: int, size: int
) -> None:
    packed, padded = both(build_actor)
    rows = mixed_rows(tiny_processing, num_contexts=num_contexts, size=size)
    assert largest_gap(packed.score(rows), padded.score(rows)) < LOG_PROBS
    assert (packed.passes.packed, padded.passes.packed) == (True, False)


def batch_of(rows: list[ScoringRow]) -> OptimizerBatch:
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
    advantages = torch.linspace(-1, 1, len(rows)).unsqueeze(1).expand(mask.shape).where(mask, 0.0)
    old = torch.full(mask.shape, -5.5).where(mask, 0.0)
    return OptimizerBatch(
        rows=rows,
        old_log_probs=old,
        advantages=advantages,
        response_mask=mask,
        denominators=LossDenominators(int(lengths.sum()), len(rows), 40),
    )


def gradient_of(actor: Actor, batch: OptimizerBatch) -> Tensor:
    """All weights' gradients of one optimizer step that moves nothing, as one vector."""
    for parameters in actor.optimizer.param_groups:
        parameters["lr"] = 0.0
    actor._optimizer_step(batch)
    return torch.cat([whole(weight.grad).flatten() for weight in actor.module.parameters() if weight.grad is not None])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"model__enable_gradient_checkpointing": "true"}, id="all weights, the vision tower too"),
        pytest.param({"model__enable_gradient_checkpointing": "false"}, id="without recomputation"),
        pytest.param(
            {"model__enable_gradient_checkpointing": "true", "model__freeze_vision_tower": "true"}, id="frozen tower"
        ),
        pytest.param({"model__enable_gradient_checkpointing": "true", "model__lora__rank": "4"}, id="adapter"),
    ],
)
@pytest.mark.parametrize(("num_contexts", "size"), [(2, 2)])
def test_packed_gradients_are_the_padded_ones_to_1e_minus_5(
    build_actor: BuildActor, tiny_processing: Processing, settings: dict[str, str], num_contexts: int, size: int
) -> None:
    packed, padded = both(build_actor, max_grad_norm="1e9", **settings)
    if "model__lora__rank" in settings:
        for actor in (packed, padded):
            _draw_adapter(actor)
    batch = batch_of(mixed_rows(tiny_processing, num_contexts=num_contexts, size=size))
    gradient, expected = gradient_of(packed, batch), gradient_of(padded, batch)
    assert float(expected.norm()) > 0
    assert float((gradient - expected).norm() / expected.norm()) < GRADIENTS


def _draw_adapter(actor: Actor) -> None:
    """B of a fresh adapter is 0 and would hide the gradient of A."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in actor.module.named_parameters():
            if "lora_B" in name:
                local: Any = getattr(weight, "_local_tensor", weight)
                local.copy_(torch.randn(local.shape, generator=generator) * 0.05)


@pytest.mark.heavy
def test_a_budget_of_tokens_cuts_passes_and_changes_no_log_prob(
    build_actor: BuildActor, tiny_processing: Processing
) -> None:
    actor = build_actor()
    rows = mixed_rows(tiny_processing, num_contexts=3, size=5)
    whole_pass = actor.score(rows)
    largest = max(row.num_tokens for row in rows)
    actor.passes._longest_row = largest
    for size in (1, 3):
        cut = [part.indices for part in actor.passes.cut(rows, size)]
        assert len(cut) > 1
        assert all(forest_of([rows[row] for row in one], tiny_processing).num_tokens <= size * largest for one in cut)
    actor._config = type(actor._config)(  # the same settings with one sample's tokens to a pass
        **{**vars(actor._config), "micro_batch_size_per_device_for_experience": 1}
    )
    assert largest_gap(actor.score(rows), whole_pass) < LOG_PROBS


def test_equal_images_in_two_objects_are_encoded_once(tiny_processing: Processing) -> None:
    one, other = (encoded(tiny_processing, "Find x in this figure, please.", picture(1)) for _ in range(2))
    rows = [ScoringRow(context=context, response_ids=(5, 6, 7)) for context in (one, other)]
    batch = collate_packed(
        rows, forest_of(rows, tiny_processing), processing=tiny_processing, device=torch.device("cpu")
    )
    assert batch.image_order == (0,)
    assert batch.input_ids.numel() == len(one.token_ids) + 2 * 2


@pytest.mark.heavy
def test_a_frozen_tower_sees_each_image_once_a_step(
    build_actor: BuildActor, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained tower sees it in every pass."""
    from cepo.models.families.qwen import GridFamily

    seen: list[int] = []
    original = GridFamily.features

    def counted(self: GridFamily, model: Any, images: Sequence[ImageInputs], device: torch.device) -> Any:
        seen.append(sum(one.num_units for one in images))
        return original(self, model, images, device)

    monkeypatch.setattr(GridFamily, "features", counted)
    rows = mixed_rows(tiny_processing, num_contexts=2, size=2)  # four pictures
    for frozen, expected in ((True, 4), (False, 4 * 3)):
        actor = build_actor(model__freeze_vision_tower=str(frozen).lower())
        seen.clear()
        actor.score(rows)
        actor.score(rows, as_teacher=True)
        actor.update([batch_of(rows)], step=0)
        assert sum(seen) == expected
        actor.finish_step(0)
        actor.score(rows)
        assert sum(seen) == expected + 4


@pytest.mark.heavy
def test_filling_a_packed_row_to_blocks_changes_no_log_prob(
    build_actor: BuildActor, tiny_processing: Processing
) -> None:
    """The blocks have 128 tokens."""
    actor = build_actor()
    rows = mixed_rows(tiny_processing, num_contexts=2, size=3)
    forest = forest_of(rows, tiny_processing)
    plain, filled = (
        collate_packed(rows, forest, processing=tiny_processing, device=actor.device, multiple_of=multiple)
        for multiple in (1, 128)
    )
    assert filled.input_ids.shape[1] % 128 == 0
    assert 0 < filled.input_ids.numel() - plain.input_ids.numel() < 128
    with torch.no_grad():
        assert largest_gap([actor.module(filled)[0]], [actor.module(plain)[0]]) < LOG_PROBS


@pytest.mark.heavy
def test_the_share_of_saved_tokens_is_counted(build_actor: BuildActor, tiny_processing: Processing) -> None:
    actor = build_actor()
    rows = mixed_rows(tiny_processing, num_contexts=3, size=5)
    actor.score(rows)
    metrics = actor.passes.metrics()
    asked, computed = sum(row.num_tokens for row in rows), forest_of(rows, tiny_processing).num_tokens
    assert metrics["work/tokens_computed"].result == computed
    assert metrics["work/tokens_saved"].result == pytest.approx(1 - computed / asked)
    assert computed < 0.5 * asked
    actor.score(rows[:1])
    assert actor.passes.metrics()["work/tokens_computed"].result == rows[0].num_tokens - 1, "those since the last call"
