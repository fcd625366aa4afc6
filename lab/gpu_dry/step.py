"""Scores and updates with the trainer's own actor or critic on the hollow GPU, and compares with the processor.

Every operation is checked for mixed devices and then computed on the processor (`processor_behind`), so the log-probs
must equal those of a process without a GPU. Three things differ from a real card: attention uses no compiled kernel
(`attention` checks those), SDPA its formula, and the language head torch's operations (`head` checks the kernel).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.gpu_dry.cards import report
from lab.gpu_dry.processor_behind import ProcessorBehind
from lab.support.machine import ROOT
from lab.support.rows import HINT_TOKENS, build_rows, optimizer_batch
from lab.support.shapes import MICRO, write_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "adapter, packed rows": {"model.lora.rank": 4},
    "adapter, padded rows": {"model.lora.rank": 4, "padding_free": "false", "dynamic_batching": "false"},
    "adapter, bf16": {"model.lora.rank": 4, "fsdp.mp_param_dtype": "bf16"},
    "adapter, phases offloaded": {
        "model.lora.rank": 4,
        "offload.offload_params": "true",
        "offload.offload_optimizer": "true",
    },
    "all weights": {"model.lora.rank": 0, "model.freeze_vision_tower": "false"},
    "all weights, FSDP offloads": {"model.lora.rank": 0, "fsdp.enable_cpu_offload": "true"},
}
TEACHERS = {"adapter, packed rows": "reference", "adapter, phases offloaded": "ema", "all weights": "snapshot"}
LIMITS = {"fp32": 1e-4, "bf16": 0.1}
"""Largest accepted gap in nats between the log-probs with and without the hollow GPU."""
VIEW = "correct"


def build(case: str, folder: Path) -> Any:
    """Returns the actor of the case on this process's device."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor

    settings = {"model.model_path": folder, "model.enable_gradient_checkpointing": "true", **CASES[case]}
    arguments = [f"worker.actor.{name}={value}" for name, value in settings.items()]
    config = load_config([f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", *arguments])
    return Actor(
        config.worker.actor,
        Processing(str(folder)),
        temperature=0.9,
        teacher=TeacherConfig(source=TEACHERS.get(case, "actor")),  # pyright: ignore[reportArgumentType]
        objective_settings=ObjectiveSettings(kl_coefficient=0.01),
        with_reference=True,
        total_steps=4,
        seed=1,
        longest_row=MICRO.prompt_tokens + HINT_TOKENS + MICRO.longest,
    )


def run(case: str) -> dict[str, Any]:
    """Takes two steps as the trainer does, with every kind of pass, and returns what they found."""
    from cepo.data.batch import OWN_VIEW
    from cepo.models.processing import Processing
    from cepo.rollout.generator import FullWeights
    from cepo.types import Distillation, DivergenceConfig

    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(MICRO, Path(name) / "model", dtype="bfloat16")
        views = build_rows(
            MICRO, Processing(str(folder)), groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens
        )
        own, teacher = (
            [dataclasses.replace(row, row=index, view=view) for index, row in enumerate(rows)]
            for rows, view in zip(views, (OWN_VIEW, VIEW), strict=True)
        )
        actor = build(case, folder)
        found: dict[str, Any] = {"log_probs": [], "grad_norm": []}
        for step in range(2):
            scored = actor.score(own) + actor.score(teacher, as_teacher=True, keep_states=VIEW)
            scored += actor.score(own, as_reference=True) + actor.score(own, result="entropy")
            batch = optimizer_batch(own)
            mask = batch.response_mask
            batch = dataclasses.replace(
                batch,
                on_policy=False,
                old_log_probs=padded(scored[: len(own)], mask),
                reference_log_probs=padded(scored[2 * len(own) : 3 * len(own)], mask),
                distillation=Distillation(
                    divergence=DivergenceConfig(kind="jsd"), token_weight=mask.float(), view=VIEW
                ),
            )
            metrics = actor.update([batch], step=step)
            actor.finish_step(step)
            actor.forget_gradients()
            weights = actor.rollout_weights()
            if isinstance(weights, FullWeights):
                list(weights.tensors)
            actor.rest()
            found["log_probs"].append([value for row in scored for value in row.tolist()])
            found["grad_norm"].append(metrics["actor/grad_norm"].value)
        return found | {"packed": actor.passes.packed}


def padded(rows: list[Tensor], mask: Tensor) -> Tensor:
    """Returns (R, T) with each row's values at the start."""
    found = torch.zeros(mask.shape)
    found[mask] = torch.cat(rows)
    return found


def attend_by_formula_to_mask(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Computes what the compiled attention computes, from the same mask."""
    place = torch.arange(query.shape[2], device=query.device)
    visible = mask.mask_mod(place, place, place[:, None], place[None])
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = (query.float() @ key.float().mT * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(dim=-1) @ value.float()).to(query.dtype)


def mixtures_are_refused() -> bool:
    """Returns whether a sum of tensors on two devices raises, so that the check itself is known to work."""
    try:
        torch.zeros(2, device="cuda") + torch.zeros(2)
    except RuntimeError:
        return True
    return False


def on_hollow_gpu(case: str) -> tuple[dict[str, Any], int]:
    """Returns what `run` finds on the hollow GPU, and the number of operations that were checked."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cepo.models import segments

    segments.compiled = lambda backend: attend_by_formula_to_mask  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        behind = stack.enter_context(ProcessorBehind())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        assert mixtures_are_refused(), "a sum of tensors on two devices was not refused"
        return run(case), behind.operations


def on_processor(case: str) -> dict[str, Any]:
    """Returns what `run` finds in a process without the hollow GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-m", "lab.gpu_dry.step", case, "cpu"]
    done = subprocess.run(
        command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(case: str) -> None:
    here, operations = on_hollow_gpu(case)
    there = on_processor(case)
    pairs = zip(chain(*here["log_probs"]), chain(*there["log_probs"]), strict=True)
    gap = max(abs(one - other) for one, other in pairs)
    limit = LIMITS[CASES[case].get("fsdp.mp_param_dtype", "fp32")]
    report(
        ok=gap <= limit and here["packed"] == there["packed"],
        found=f"{operations:,} operations, none mixes devices; log-probs differ from the processor's by {gap:.0e} nats",
    )


if __name__ == "__main__":
    if sys.argv[2:] == ["cpu"]:
        print(json.dumps(run(sys.argv[1])))
    else:
        main(sys.argv[1])
