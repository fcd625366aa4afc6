"""A checkpoint has the teacher's weights as they were, which are neither the initial ones nor the actor's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actors import build_actor, differing, parameters_of
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.microgeo.world import ASSETS
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_state, load_weights, save_state
from cepo.workers.distributed import whole_tensor

pytestmark = pytest.mark.usefixtures("one_rank")


def moved(actor: Actor, seed: int) -> None:
    """Changes every trained weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.module.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(0.01 * torch.randn(parameter.shape, generator=generator))


def copies_of(actor: Actor) -> dict[str, Tensor]:
    return {name: whole_tensor(copy).clone() for name, copy in actor.teacher_weights.copies.items()}


@pytest.mark.parametrize("source", ["snapshot", "ema"])
def test_a_teachers_weights_come_back_as_they_were_saved(source: str, tmp_path: Path) -> None:
    """The weights move, the copy follows them, and they move again before the checkpoint."""
    teacher = TeacherConfig(source=source, sync_every=1, ema_decay=0.5)  # type: ignore[arg-type]
    folder = Path(ASSETS)
    settings = {"model__lora__rank": 4}
    actor = build_actor(folder, teacher=teacher, **settings)
    initial = copies_of(actor)
    moved(actor, 1)
    actor.teacher_weights.after_update(0)
    moved(actor, 2)
    saved = copies_of(actor)
    for different_weights in (initial, parameters_of(actor)):
        assert differing(saved, different_weights) == list(saved)
    save_state(actor, tmp_path / "actor")
    restored = build_actor(folder, teacher=teacher, **settings)
    load_state(restored, tmp_path / "actor")
    assert differing(copies_of(restored), saved) == []


@pytest.mark.heavy
def test_weights_alone_bring_the_teacher_that_was_saved_or_none(tmp_path: Path) -> None:
    """A snapshot comes from its checkpoint, and from a checkpoint without one it is the restored actor."""
    folder = Path(ASSETS)
    settings = {"model__lora__rank": 4}
    follows = TeacherConfig(source="snapshot")
    for saved_by in (follows, TeacherConfig()):
        actor = build_actor(folder, teacher=saved_by, **settings)
        moved(actor, 1)
        save_state(actor, tmp_path / saved_by.source)
        restored = build_actor(folder, teacher=follows, **settings)
        load_weights(restored, tmp_path / saved_by.source)
        assert differing(copies_of(restored), copies_of(actor) or parameters_of(actor)) == []
        assert differing(parameters_of(restored), parameters_of(actor)) == []
