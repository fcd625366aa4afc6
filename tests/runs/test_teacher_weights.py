from __future__ import annotations

from typing import Any

import pytest
import torch
from generator_cases import picture
from rounding import LOG_PROBS
from test_actor import own_batch
from torch import Tensor
from training_runs import BuildActor, differing, encoded, largest_gap, parameters_of, rows_of, whole

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.workers.actor import Actor

pytestmark = pytest.mark.heavy


@pytest.fixture
def rows(tiny_processing: Processing) -> list[ScoringRow]:
    return rows_of([encoded(tiny_processing, "Find x of this figure.", picture(1))], [8] * 6)


def train(actor: Actor, rows: list[ScoringRow], *, step: int) -> None:
    actor.update([own_batch(actor, rows)], step=step)
    actor.finish_step(step)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(("rank", "full_shard"), [(0, False), (4, True)])
def test_the_reference_teacher_scores_as_at_step_0(
    build_actor: BuildActor, rows: list[ScoringRow], rank: int, full_shard: bool
) -> None:
    """It does so after 3 updates."""
    settings = {"model__lora__rank": rank, "optim__lr": "1e-3", "fsdp__enable_full_shard": full_shard}
    actor = build_actor(teacher=TeacherConfig(source="reference"), **settings)
    first = actor.score(rows)
    for step in range(3):
        train(actor, rows, step=step)
        live, student = parameters_of(actor), actor.score(rows)
        assert equal(actor.score(rows, as_teacher=True), first)
        assert differing(live, parameters_of(actor)) == []
        assert equal(actor.score(rows), student)
        assert largest_gap(student, first) > 1e-3
    if not rank:
        return
    # An adapter trains after a pass without it as if there had been none.
    plain = build_actor(**settings)
    for step in range(3):
        train(plain, rows, step=step)
    assert differing(parameters_of(plain), parameters_of(actor)) == []


def test_a_snapshot_every_2_steps_is_the_actor_at_2_and_4(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    teacher = TeacherConfig(source="snapshot", sync_every=2)
    actor = build_actor(teacher=teacher, optim__lr="1e-3", fsdp__enable_full_shard=False)
    kept = actor.score(rows)
    for step in range(4):
        train(actor, rows, step=step)
        student = actor.score(rows)
        if (step + 1) % 2 == 0:
            kept = student
        assert equal(actor.score(rows, as_teacher=True), kept)
        assert equal(student, kept) == (step in (1, 3))


@pytest.mark.parametrize(("dtype", "decay"), [("fp32", 0.9), ("bf16", 0.999)])
def test_the_average_decays_geometrically_from_the_start(
    build_actor: BuildActor, rows: list[ScoringRow], dtype: str, decay: float
) -> None:
    actor = build_actor(teacher=TeacherConfig(source="ema", ema_decay=decay), fsdp__torch_dtype=dtype, optim__lr="1e-2")
    start = {name: whole(copy).clone() for name, copy in actor.teacher_weights.copies.items()}
    actor.update([own_batch(actor, rows)], step=0)
    student = {name: tensor.float() for name, tensor in parameters_of(actor).items()}
    assert parameters_of(actor)[next(iter(student))].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for step in range(5):
        actor.finish_step(step)
    average = {name: whole(copy) for name, copy in actor.teacher_weights.copies.items()}
    expected = {name: decay**5 * start[name] + (1 - decay**5) * student[name] for name in start}
    assert largest_gap(average.values(), expected.values()) < 1e-6
    # In bfloat16 itself an average at 0.999 would stand still.
    moved = torch.cat([(average[name] - start[name]).abs().flatten() for name in start])
    assert float((moved > 0).float().mean()) > 0.5
    assert {tensor.dtype for tensor in average.values()} == {torch.float32}


def test_a_pass_of_the_average_restores_the_students_bits(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor(teacher=TeacherConfig(source="ema", ema_decay=0.5), optim__lr="1e-3")
    train(actor, rows, step=0)
    live, student = parameters_of(actor), actor.score(rows)
    taught = actor.score(rows, as_teacher=True)
    assert differing(live, parameters_of(actor)) == []
    assert equal(actor.score(rows), student)
    twin = build_actor(optim__lr="1e-3")
    weights: dict[str, Any] = dict(twin.module.named_parameters())
    for name, average in actor.teacher_weights.copies.items():
        weights[name].data.copy_(average)
    assert largest_gap(twin.score(rows), taught) < LOG_PROBS
    assert largest_gap(student, taught) > 1e-3
