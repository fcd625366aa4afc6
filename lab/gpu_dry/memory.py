"""Counts the peak memory of scoring and update at a published model's sizes, by torch's own allocator on the hollow GPU.

    python -m lab.gpu_dry.memory CASE

Large operations allocate their results and compute nothing, so the trainer's own code runs at real sizes in a minute.
Attention and the language head allocate what their kernels allocate. The estimate (`cepo.workers.memory`) must be an
upper bound of what the allocator reserves.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lab.gpu_dry.cards import report
from lab.gpu_dry.checkpoint import write_configuration
from lab.gpu_dry.processor_behind import ProcessorBehind, Shapes
from lab.support.machine import ROOT

MOST_COMPUTED = 300_000
"""Elements of the largest tensor of an operation that is still computed, so that indices and lengths have values."""
GROUPS = 4
GROUP_SIZE = 8
PROMPT = 500
LONGEST = 2048


class Case(NamedTuple):
    """A run whose memory is counted; `settings` are added to those of `configs/geo3k/cepo.yaml`."""

    shape: str
    devices: int
    settings: tuple[str, ...] = ()


FULL = ("worker.actor.model.lora.rank=0",)
DORA = ("worker.actor.model.lora.use_dora=true",)
CASES = {
    "2b, adapter": Case("qwen3-vl-2b", 1),
    "2b, DoRA": Case("qwen3-vl-2b", 1, DORA),
    "2b, all weights": Case("qwen3-vl-2b", 1, FULL),
    "4b, adapter, first of 8": Case("qwen3-vl-4b", 8),
}


class AllocatesLargeResults(ProcessorBehind):
    """Allocates the results of operations on large tensors on the device, and computes those of small ones."""

    def _communicated(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        return func(*args, **kwargs)  # the other ranks do not exist, and the group's operations do nothing

    def _computed(self, func: Any, args: Any, kwargs: Any, device: torch.device | None, shapes: Shapes | None) -> Any:
        needs_gpu = "scaled_dot_product" in func.name()
        if shapes is None or not (needs_gpu or is_large((args, kwargs, shapes.result))):
            return super()._computed(func, args, kwargs, device, shapes)
        real_of = {id(fake): tensor for fake, tensor in shapes.operands}

        def allocated(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in real_of:  # an operand that was changed in place
                return real_of[id(value)]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

        return tree_map(allocated, shapes.result)


def is_large(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() > MOST_COMPUTED for leaf in tree_leaves(tree))


class _Attention(torch.autograd.Function):
    """Allocates what the compiled attention does: the output and the log-sums, then gradients and the products' sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        output = torch.empty_like(query)
        log_sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        query, key, value, _, log_sums = ctx.saved_tensors
        products = torch.empty_like(log_sums)
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        del products
        return gradients


def replace_kernels() -> None:
    """Puts allocations in place of the kernels that would be compiled, and of the checkpoint's weights."""
    import transformers

    from cepo.models import head, head_kernel, pretrained, segments

    def attend(query: Tensor, key: Tensor, value: Tensor, layout: Any, scale: float) -> Any:
        return _Attention.apply(query, key, value)

    def log_probs(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.float32, device=logits.device)

    def load_model(path: str, *, dtype: torch.dtype, with_weights: bool = True, **_: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForImageTextToText.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        model.tie_weights()
        return model.to_empty(device="cpu") if with_weights else model  # untouched host memory takes none

    segments.attend_by_blocks = attend
    head._kernel_works = lambda device, dtype: True
    head_kernel.log_probs_in_place = log_probs
    pretrained.load_model = load_model


def peaks() -> tuple[int, int]:
    """Returns the peaks of allocated and reserved bytes since the last call."""
    counted = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return counted


def run(case: Case, folder: Path) -> tuple[dict[str, tuple[int, int]], Any, int]:
    """Returns the peaks of each stage, the estimate, and the number of operations."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.data.batch import OWN_VIEW
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor
    from cepo.workers.memory import estimate_memory
    from cepo.workers.worker import objective_settings
    from lab.support.rows import build_rows, optimizer_batch
    from lab.support.shapes import SHAPES

    given = [f"worker.actor.model.model_path={folder}", f"trainer.n_gpus_per_node={case.devices}"]
    config = load_config([f"config={ROOT / 'configs' / 'geo3k' / 'cepo.yaml'}", *given, *case.settings])
    processing = Processing(str(folder))
    shape = dataclasses.replace(SHAPES[case.shape], image=(20, 20), prompt_tokens=PROMPT, shortest=200, longest=LONGEST)
    views = build_rows(shape, processing, groups=GROUPS, group_size=GROUP_SIZE, contexts=3, prompt=PROMPT)
    rows: list[Any] = []
    for name, rows_of_view in zip((OWN_VIEW, "correct", "wrong"), views, strict=True):
        for index, row in enumerate(rows_of_view):
            rows.append(dataclasses.replace(row, row=index, view=name, prompt=index // GROUP_SIZE))
    own = [row for row in rows if row.view == OWN_VIEW]
    teachers = [row for row in rows if row.view != OWN_VIEW]
    found: dict[str, tuple[int, int]] = {}
    with AllocatesLargeResults() as mode:
        actor = Actor(
            config.worker.actor,
            processing,
            temperature=1.0,
            teacher=TeacherConfig(),
            objective_settings=objective_settings(config.worker.actor, config.algorithm),
            with_reference=False,
            total_steps=2,
            seed=1,
            longest_row=config.data.max_prompt_length + config.data.max_response_length,
        )
        peaks()
        for step in range(2):  # the second step has the optimizer's state
            actor.score(teachers)
            found["scoring"] = peaks()
            actor.update([optimizer_batch(own)], step=step)
            found["update"] = peaks()
            actor.finish_step(step)
            actor.forget_gradients()
            peaks()
    return found, estimate_memory(config, with_vllm=True), mode.operations


def main(name: str) -> None:
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cepo.hardware import reserve_memory_in_growing_segments

    if os.environ.get("CEPO_DRY_SEGMENTS") != "fixed":
        reserve_memory_in_growing_segments()
    case = CASES[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    replace_kernels()
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(case.shape, Path(folder))
        found, memory, operations = run(case, Path(folder))
    from cepo.workers.memory import bound_in_passes

    bound = bound_in_passes(memory)
    stages = ", ".join(
        f"{stage} {allocated / 2**30:.1f} (reserved {reserved / 2**30:.1f})"
        for stage, (allocated, reserved) in found.items()
    )
    most = max(reserved for _, reserved in found.values())
    report(ok=most <= bound, found=f"GiB: {stages}; bound {bound / 2**30:.1f}; {operations:,} operations")


if __name__ == "__main__":
    main(sys.argv[1])
