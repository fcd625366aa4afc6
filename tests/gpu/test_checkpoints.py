from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from actors import distance
from gpu_places import LOG_PROB_LIMITS, SAME_TRAINING, Place, build_actor, gaps, rows_for, trained, weights_of, within

from cepo.algorithms.settings import TeacherConfig
from cepo.workers.actor_critic import Actor
from cepo.workers.checkpoint import load_state, save_state
from cepo.workers.distributed import whole_tensor

EMA = TeacherConfig(source="ema", ema_decay=0.9)


def moments_of(actor: Actor) -> list[torch.Tensor]:
    """Adam's state in the order of the weights, on the CPU."""
    states = [actor.optimizer.state[weight] for group in actor.optimizer.param_groups for weight in group["params"]]
    return [whole_tensor(state[name]).cpu() for state in states for name in ("exp_avg", "exp_avg_sq", "step")]


def test_a_resumed_actor_has_every_bit_of_the_saved_one(place: Place, tmp_path: Path, figure: Any) -> None:
    folder = place.checkpoint(place.part)
    rows = rows_for(place.part, folder, groups=1, contexts=1)
    saved = build_actor(folder, teacher=EMA)
    before = trained(saved, rows, steps=2)
    (tmp_path / "actor").mkdir()  # as another rank may have done before
    save_state(saved, tmp_path / "actor")
    resumed = build_actor(folder, teacher=EMA)
    load_state(resumed, tmp_path / "actor")
    after = weights_of(resumed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(*pair) for pair in zip(moments_of(saved), moments_of(resumed), strict=True))
    assert {weight.device.type for weight in resumed.module.parameters()} == {place.device}
    teachers = [actor.score(rows, as_teacher=True) for actor in (saved, resumed)]
    assert within(gaps(*teachers), LOG_PROB_LIMITS["bf16"])
    apart = distance(*(trained(actor, rows, steps=1, first=2) for actor in (resumed, saved)), before)
    assert figure("distance of the weights after another step", apart) <= SAME_TRAINING[place.device]
