"""What leaves the device and comes back trains alike: from a checkpoint, and from host memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from actors import differing, distance
from gpu_places import LOG_PROB_LIMITS, SAME_TRAINING, Place, build_actor, gaps, rows_for, trained, weights_of, within
from torch.distributed.tensor import DTensor

from cepo.algorithms.settings import TeacherConfig
from cepo.workers.actor import Actor
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
    saved_weights = trained(saved, rows, steps=2)
    (tmp_path / "actor").mkdir()  # as another rank may have done before
    save_state(saved, tmp_path / "actor")
    resumed = build_actor(folder, teacher=EMA)
    load_state(resumed, tmp_path / "actor")
    resumed_weights = weights_of(resumed)
    assert differing(saved_weights, resumed_weights) == []
    assert all(torch.equal(*pair) for pair in zip(moments_of(saved), moments_of(resumed), strict=True))
    assert {weight.device.type for weight in resumed.module.parameters()} == {place.device}
    teachers = [actor.score_teacher(rows) for actor in (saved, resumed)]
    assert within(gaps(*teachers), LOG_PROB_LIMITS["bf16"])
    resumed_further = trained(resumed, rows, steps=1, first=2)
    saved_further = trained(saved, rows, steps=1, first=2)
    apart = distance(resumed_further, saved_further, saved_weights)
    assert figure("distance of the weights after another step", apart) <= SAME_TRAINING[place.device]


def held() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def num_bytes(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def sharded_and_whole(actor: Actor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights that FSDP shards, and those that every device has whole."""
    weights = list(actor.module.parameters())
    sharded = [weight for weight in weights if isinstance(weight, DTensor)]
    return sharded, [weight for weight in weights if not isinstance(weight, DTensor)]


def test_offloading_between_phases_changes_no_update(place: Place, figure: Any) -> None:
    folder = place.checkpoint(place.part)
    rows = rows_for(place.part, folder, groups=1, contexts=1)
    plain = build_actor(folder)
    start = weights_of(plain)
    expected = trained(plain, rows, steps=3)
    actor = build_actor(folder, offload__offload_params="true", offload__offload_optimizer="true")
    offloaded = trained(actor, rows, steps=3)
    apart = figure("distance of the weights after 3 steps", distance(offloaded, expected, start))
    assert apart <= SAME_TRAINING[place.device]
    assert sum(bool(tensor.any()) for name, tensor in offloaded.items() if "lora_B" in name) > 0
    if place.device == "cpu":
        return
    bytes_before_rest = figure("bytes held before rest", held())
    actor.rest()
    bytes_after_rest = figure("bytes held after rest", held())
    assert {weight.device.type for weight in actor.module.parameters()} == {"cpu"}
    assert bytes_before_rest - bytes_after_rest > 0.95 * num_bytes(actor.module.parameters())
    state = [value for entry in actor.optimizer.state.values() for value in entry.values() if value.dim() > 0]
    assert {value.device.type for value in state} == {"cpu"}
    scores = actor.score(rows)
    assert {weight.device.type for weight in actor.module.parameters()} == {"cuda"}
    assert within(gaps(scores, actor.score(rows)), LOG_PROB_LIMITS["bf16"])


def test_weights_in_host_memory_score_and_train_alike(place: Place, figure: Any) -> None:
    folder = place.checkpoint(place.part)
    rows = rows_for(place.part, folder, groups=1, contexts=1)
    plain = build_actor(folder)
    expected = plain.score(rows)
    start = weights_of(plain)
    trained_plain = trained(plain, rows, steps=2)  # and the libraries' work space is there before anything is measured
    if place.device == "cuda":
        del plain
        gc.collect()
        torch.cuda.empty_cache()
    bytes_before = held() if place.device == "cuda" else 0
    actor = build_actor(folder, fsdp__enable_cpu_offload="true")
    differences = gaps(actor.score(rows), expected)
    figure("log-prob gap, largest, nats", differences[2])
    assert within(differences, LOG_PROB_LIMITS["bf16"])
    apart = distance(trained(actor, rows, steps=2), trained_plain, start)
    assert figure("distance of the weights after 2 steps", apart) <= SAME_TRAINING[place.device]
    if place.device == "cuda":
        sharded, whole = sharded_and_whole(actor)
        assert {weight.device.type for weight in sharded} == {"cpu"}
        assert {weight.device.type for weight in whole} == {"cuda"}, "the frozen vision tower stays on the device"
        bytes_on_device = figure("bytes held beside the vision tower", held() - bytes_before - num_bytes(whole))
        assert bytes_on_device < 0.5 * figure("bytes of sharded weights", num_bytes(sharded))
