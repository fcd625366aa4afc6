"""Plans a step's phases on a device, and finds settings that fit if a configuration is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cepo.config import RunConfig
from cepo.sizing.needs import Needs, ShapeOf, estimate_needs
from cepo.sizing.phases import Phases, plan_phases

_ADAPTER = {"rank": 16, "alpha": 32}
_SHARE_STEPS = 20  # shares of 0.05


def phases_on(config: RunConfig, needs: Needs, *, free: int, total: int, with_vllm: bool) -> Phases:
    """Returns the phases of a step on a device with `total` bytes, of which `free` are free before anything loads."""
    rollout = config.worker.rollout
    demand = needs.demand(with_vllm=with_vllm)
    share = int(rollout.gpu_memory_utilization * total) if with_vllm else 0
    return plan_phases(demand, free=free - demand.loaded, share=share, sleep=rollout.sleep)


def settings_that_fit(
    config: RunConfig, *, free: int, total: int, with_vllm: bool, shape_of_path: ShapeOf | None = None
) -> str:
    """Returns the first change to a refused configuration that makes it fit, as settings; empty if none does.

    It tries, in this order: another share of memory for vLLM, freeing vLLM's memory between phases, smaller
    micro-batches, the optimizer's state or all trained weights in host memory, and LoRA, each with every share.
    """
    for written, changed in _alternatives(config):
        needs = estimate_needs(changed, cpu_engine=False, shape_of_path=shape_of_path)
        for share, shared in _with_shares(changed) if with_vllm else iter([("", changed)]):
            phases = phases_on(shared, needs, free=free, total=total, with_vllm=with_vllm)
            if phases.fits and (written or share):
                return " ".join(part for part in (written, share) if part)
    return ""


def what_would_fit(
    config: RunConfig, *, free: int, total: int, with_vllm: bool, shape_of_path: ShapeOf | None = None
) -> str:
    """Returns `settings_that_fit` as a sentence for the user."""
    found = settings_that_fit(config, free=free, total=total, with_vllm=with_vllm, shape_of_path=shape_of_path)
    if found:
        return f"what would fit: {found}"
    return "use more devices (trainer.n_gpus_per_node), a device with more memory, or a smaller worker.actor.model.model_path"


def _alternatives(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields settings and the resulting configurations, the least intrusive first."""
    yield "", config
    rollout, actor = config.worker.rollout, config.worker.actor
    if rollout.sleep != "auto":
        config = _with_worker(config, rollout=dataclasses.replace(rollout, sleep="auto"))
        yield "worker.rollout.sleep=auto", config
    asleep = "" if rollout.sleep == "auto" else "worker.rollout.sleep=auto "
    for rows, scored in ((2, 8), (1, 4), (1, 1)):
        fewer = dataclasses.replace(
            actor,
            micro_batch_size_per_device_for_update=min(rows, actor.micro_batch_size_per_device_for_update),
            micro_batch_size_per_device_for_experience=min(scored, actor.micro_batch_size_per_device_for_experience),
        )
        if fewer != actor:
            written = (
                f"{asleep}worker.actor.micro_batch_size_per_device_for_update="
                f"{fewer.micro_batch_size_per_device_for_update} "
                f"worker.actor.micro_batch_size_per_device_for_experience={fewer.micro_batch_size_per_device_for_experience}"
            )
            yield written, _with_worker(config, actor=fewer)
    if not actor.offload.offload_optimizer:
        moved = dataclasses.replace(actor, offload=dataclasses.replace(actor.offload, offload_optimizer=True))
        yield f"{asleep}worker.actor.offload.offload_optimizer=true", _with_worker(config, actor=moved)
    if not actor.fsdp.enable_cpu_offload:
        moved = dataclasses.replace(actor, fsdp=dataclasses.replace(actor.fsdp, enable_cpu_offload=True))
        yield f"{asleep}worker.actor.fsdp.enable_cpu_offload=true", _with_worker(config, actor=moved)
    if actor.model.lora.rank == 0:
        lora = dataclasses.replace(actor.model.lora, **_ADAPTER)
        adapted = dataclasses.replace(actor, model=dataclasses.replace(actor.model, lora=lora))
        yield f"{asleep}worker.actor.model.lora.rank={lora.rank}", _with_worker(config, actor=adapted)


def _with_shares(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields the configuration unchanged, then with other shares for vLLM, the nearest first."""
    yield "", config
    rollout = config.worker.rollout
    shares = (round(step / _SHARE_STEPS, 2) for step in range(_SHARE_STEPS - 1, 0, -1))
    for share in sorted(shares, key=lambda share: abs(share - rollout.gpu_memory_utilization)):
        changed = dataclasses.replace(rollout, gpu_memory_utilization=share)
        yield f"worker.rollout.gpu_memory_utilization={share:g}", _with_worker(config, rollout=changed)


def _with_worker(config: RunConfig, **parts: Any) -> RunConfig:
    return dataclasses.replace(config, worker=dataclasses.replace(config.worker, **parts))
