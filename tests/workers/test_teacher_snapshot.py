"""A snapshot teacher's weights follow the update after which they are due."""

from __future__ import annotations

import torch
from torch import nn

from cepo.algorithms.settings import TeacherConfig
from cepo.workers.swapping import TeacherWeights


def test_a_snapshot_every_2_steps_is_taken_after_the_2nd_update() -> None:
    """The weight is the number of updates so far, and the teacher's is that of its last snapshot."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    teacher = TeacherWeights(module, TeacherConfig(source="snapshot", sync_every=2))
    seen: list[float] = []
    for step in range(4):
        with torch.no_grad():
            module.weight.add_(1.0)
        teacher.after_update(step)
        with teacher.active():
            seen.append(module.weight.item())
        assert module.weight.item() == step + 1
    assert seen == [0.0, 2.0, 2.0, 4.0]
