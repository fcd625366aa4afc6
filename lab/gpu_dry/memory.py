"""Counts the peak memory of scoring and update at a published model's sizes, by torch's own allocator on the hollow GPU.

    python -m lab.gpu_dry.memory CASE

Large operations allocate their results and compute nothing, so the trainer's own code runs at real sizes in a minute.
Attention and the language head allocate what their kernels allocate. The estimate (`cepo.workers.memory`) must be an
upper bound of what the allocator reserves; where the estimate refuses the run, the run must exhaust the card's memory.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lab.gpu_dry.cards import CARDS, report
from lab.gpu_dry.checkpoint import write_model
from lab.gpu_dry.processor_behind import ProcessorBehind, described
from lab.gpu_dry.published import PUBLISHED
from lab.support.machine import ROOT

if TYPE_CHECKING:
    from cepo.config import RunConfig
    from cepo.data.batch import ScoringRow
    from cepo.models.processing import Processing
    from cepo.workers.memory import Memory

MOST_COMPUTED = 300_000
"""Elements of the largest tensor of an operation that is still computed, so that indices and lengths have values."""
GROUPS = 4
GROUP_SIZE = 8
PROMPT = 500
LONGEST = 2048
HINT = 20
STEPS = 2
"""The second step has the optimizer's state."""


class Case(NamedTuple):
    """A run whose memory is counted.

    Attributes:
        model: of `SHAPES` or of `PUBLISHED`.
        settings: added to those of `configs/geo3k/cepo.yaml`.
        cards: on which it is counted.
        has_critic: whether the method is one with a critic.
    """

    model: str
    devices: int = 1
    settings: tuple[str, ...] = ()
    cards: tuple[str, ...] = ("H100",)
    has_critic: bool = False


FULL = ("worker.actor.model.lora.rank=0",)
DORA = ("worker.actor.model.lora.use_dora=true",)
QLORA = ("worker.actor.model.lora.quantization=nf4",)
CASES = {
    "2b, adapter": Case("qwen3-vl-2b", cards=tuple(CARDS)),
    "2b, DoRA": Case("qwen3-vl-2b", settings=DORA),
    "2b, QLoRA": Case("qwen3-vl-2b", settings=QLORA, cards=("H100", "RTX 4090")),
    "2b, all weights": Case("qwen3-vl-2b", settings=FULL, cards=tuple(CARDS)),
    "2b, adapter and critic": Case("qwen3-vl-2b", has_critic=True),
    "4b, adapter, first of 8": Case("qwen3-vl-4b", devices=8),
    "4b, all weights, first of 8": Case("qwen3-vl-4b", devices=8, settings=FULL),
    "InternVL3 2b, adapter": Case("internvl3-2b"),
    "InternVL3 2b, all weights": Case("internvl3-2b", settings=FULL),
    "SmolVLM2 2.2b, adapter": Case("smolvlm2-2.2b"),
    "SmolVLM2 2.2b, all weights": Case("smolvlm2-2.2b", settings=FULL),
}


class Operand(NamedTuple):
    """The place of an operation's result among its operands, which it changes."""

    index: int


class Allocation(NamedTuple):
    """A tensor that an operation makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


COMPUTED = object()
"""In place of an operation's result: it is computed."""


class AllocatesLargeResults(ProcessorBehind):
    """Allocates the results of operations on large tensors on the device, and computes those of small ones.

    A layer's operations repeat with equal shapes, so what an operation makes is found once for each set of shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[object, Any] = {}

    def _communicated(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        return func(*args, **kwargs)  # the other ranks do not exist, and the group's operations do nothing

    def _operated(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        key = described((func, args, kwargs))
        if key not in self._results:
            self._results[key] = self._result(func, args, kwargs)
        result = self._results[key]
        if result is COMPUTED:
            return self._computed(func, args, kwargs, place)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves_too = (Operand, Allocation)
        return tree_map(lambda leaf: made(leaf, operands), result, is_leaf=lambda leaf: isinstance(leaf, leaves_too))

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what the operation makes, which is nothing for many that work in place, or `COMPUTED`."""
        shapes = self._shapes(func, args, kwargs)
        needs_gpu = "scaled_dot_product" in func.name() or func.namespace == "bitsandbytes"
        if shapes is None or not (needs_gpu or is_large((args, kwargs, shapes.result))):
            return COMPUTED
        places = {id(fake): index for index, (fake, _) in enumerate(shapes.operands)}

        def noted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in places:
                return Operand(places[id(value)])
            return Allocation(tuple(value.shape), value.stride(), value.dtype, value.device)

        return tree_map(noted, shapes.result)


def made(leaf: Any, operands: list[Tensor]) -> Any:
    if isinstance(leaf, Operand):
        return operands[leaf.index]
    return leaf.made() if isinstance(leaf, Allocation) else leaf


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
    from cepo.models.families import family_of
    from cepo.models.patch_embedding import use_linear_patch_embedding
    from cepo.workers import training

    def attend(query: Tensor, key: Tensor, value: Tensor, layout: Any, scale: float) -> Any:
        return _Attention.apply(query, key, value)

    def log_probs(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.float32, device=logits.device)

    def load_model(
        path: str, *, dtype: torch.dtype, with_weights: bool = True, quantization: Any = None, **_: Any
    ) -> Any:
        config = transformers.AutoConfig.from_pretrained(path)
        family = family_of(config)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForImageTextToText.from_config(
                config, dtype=dtype, attn_implementation=family.attention
            )
        model.tie_weights()
        use_linear_patch_embedding(family.vision_parts(model))
        if with_weights:
            model.to_empty(device="cpu")  # untouched host memory takes none
        if quantization is not None:
            quantise(model, quantization)
        return model

    # Gradients are whatever memory held: their norm counts as 1, since no step is taken with one that is not finite.
    training.whole_tensor = lambda norm: torch.ones(())
    segments.attend_by_blocks = attend
    segments.require_packed_attention = lambda *_: None
    head._kernel_works = lambda device, dtype: True
    head_kernel.log_probs_in_place = log_probs
    pretrained.load_model = load_model


def quantise(model: Any, quantization: Any) -> None:
    """Packs the language model's linear layers by bitsandbytes on the device, as `pretrained.load_model` does."""
    from cepo.models.families import family_of
    from cepo.models.pretrained import _prepare_quantised

    tower: set[torch.nn.Module] = set()
    for part in family_of(model.config).vision_parts(model):
        tower.update(part.modules())
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear and layer not in tower and name != "lm_head":
                setattr(parent, name, packed(layer, quantization))
    model.is_loaded_in_4bit = True
    model.quantization_method = "bitsandbytes"
    _prepare_quantised(model)


def packed(layer: torch.nn.Linear, quantization: Any) -> torch.nn.Module:
    """Returns a layer of bitsandbytes with the weight of `layer` in 4 bits on the device."""
    import bitsandbytes

    modules: Any = bitsandbytes.nn
    options = {
        "compress_statistics": quantization.bnb_4bit_use_double_quant,
        "quant_type": quantization.bnb_4bit_quant_type,
        "quant_storage": quantization.bnb_4bit_quant_storage,
    }
    result = modules.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=quantization.bnb_4bit_compute_dtype,
        device="meta",
        **options,
    )
    weight = modules.Params4bit(layer.weight.data, requires_grad=False, module=result, **options)
    result.weight = weight.to("cuda")
    result.bias = layer.bias
    return result


def rows_of_views(name: str, processing: Processing) -> list[list[ScoringRow]]:
    """Returns the rows of a step under the prompt alone and under two teachers' contexts."""
    from testing.rows import build_rows
    from testing.shapes import SHAPES

    if name in PUBLISHED:
        return rows_of_published(name, processing)
    shape = dataclasses.replace(SHAPES[name], image=(20, 20), prompt_tokens=PROMPT, shortest=200, longest=LONGEST)
    return build_rows(shape, processing, groups=GROUPS, group_size=GROUP_SIZE, contexts=3, prompt=PROMPT)


def rows_of_published(name: str, processing: Processing) -> list[list[ScoringRow]]:
    """Returns such rows of a model of `PUBLISHED`, with one image for all."""
    from cepo.data.batch import ScoringRow, token_array
    from testing.rows import skewed_lengths
    from testing.shapes import QWEN3_VL_2B

    shape = dataclasses.replace(QWEN3_VL_2B, shortest=200, longest=LONGEST)
    images = processing.load_images([PUBLISHED[name].image()])
    views: list[list[ScoringRow]] = []
    for view in range(3):
        context = processing.encode("<image>\n" + "7" * (100 + HINT * view), images)
        responses = [token_array([7] * length) for length in skewed_lengths(shape, GROUP_SIZE)] * GROUPS
        views.append([ScoringRow(context=context, response_ids=response) for response in responses])
    return views


def named_rows(views: list[list[ScoringRow]]) -> tuple[list[ScoringRow], list[ScoringRow]]:
    """Returns the rows of the prompt alone, and those of the teachers, with the numbers that a step gives them."""
    from cepo.data.batch import OWN_VIEW

    by_view: dict[str, list[ScoringRow]] = {}
    for name, rows in zip((OWN_VIEW, "correct", "wrong"), views, strict=True):
        numbered = enumerate(rows)
        by_view[name] = [
            dataclasses.replace(row, row=index, view=name, prompt=index // GROUP_SIZE) for index, row in numbered
        ]
    return by_view[OWN_VIEW], by_view["correct"] + by_view["wrong"]


class Peaks:
    """The most bytes that torch's allocator had given out and had taken from the device, by stage."""

    def __init__(self) -> None:
        self.by_stage: dict[str, tuple[int, int]] = {}

    def note(self, stage: str) -> None:
        """Notes the peaks since the last note."""
        self.by_stage[stage] = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        self.forget()

    def forget(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @property
    def reserved(self) -> int:
        return max(reserved for _, reserved in self.by_stage.values())

    def __str__(self) -> str:
        stages: list[str] = []
        for stage, (allocated, reserved) in self.by_stage.items():
            stages.append(f"{stage} {allocated / 2**30:.1f} (reserved {reserved / 2**30:.1f})")
        return ", ".join(stages)


def with_values() -> str:
    """Returns the setting of a method that reads a critic's values."""
    from cepo.algorithms import available_estimators, build_estimator

    for name in available_estimators():
        if "values" in build_estimator(name).reads:
            return f"algorithm.adv_estimator={name}"
    raise LookupError("no method reads a critic's values")


def run(config: RunConfig, processing: Processing, case: Case, peaks: Peaks) -> None:
    """Takes two steps with the actor and, if the method has one, with the critic, and notes the peaks."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.workers.actor import Actor
    from cepo.workers.critic import Critic
    from cepo.workers.worker import KlInLoss, objective_settings
    from testing.rows import critic_batch, optimizer_batch

    own, teachers = named_rows(rows_of_views(case.model, processing))
    longest_row = config.data.longest_row
    actor = Actor(
        config.worker.actor,
        processing,
        temperature=1.0,
        teacher=TeacherConfig(),
        objective_settings=objective_settings(config.worker.actor, KlInLoss.of(config.algorithm)),
        with_reference=False,
        total_steps=STEPS,
        seed=1,
        longest_row=longest_row,
    )
    critic = None
    if case.has_critic:
        critic = Critic(config.worker.resolved_critic, processing, total_steps=STEPS, seed=1, longest_row=longest_row)
    peaks.forget()
    for step in range(STEPS):
        actor.score(teachers)
        peaks.note("scoring")
        if critic is not None:
            critic.values(own)
            critic.update([critic_batch(own)], step=step)
            critic.forget_gradients()
            peaks.note("critic")
        actor.update([optimizer_batch(own)], step=step)
        peaks.note("update")
        actor.finish_step(step)
        actor.forget_gradients()
        peaks.forget()


def counted(case: Case, folder: Path) -> tuple[Peaks, Memory, str | None, str | None, int]:
    """Returns the peaks, the estimate, why it refuses the card, why the run ended early, and the number of operations."""
    from cepo.config import load_config
    from cepo.models.processing import Processing
    from cepo.workers.memory import estimate_memory, fit
    from cepo.workers.pass_sizes import with_numbers

    settings = [f"worker.actor.model.model_path={folder}", f"trainer.n_gpus_per_node={case.devices}", *case.settings]
    # Single operations allocate here, not compiled kernels, which keep less.
    settings += ["worker.actor.model.compile_layers=false", "worker.critic.model.compile_layers=false"]
    if case.has_critic:
        settings.append(with_values())
    config = load_config([f"config={ROOT / 'configs' / 'geo3k' / 'cepo.yaml'}", *settings])
    memory = estimate_memory(with_numbers(config), with_vllm=True)
    free, total = torch.cuda.mem_get_info()
    refused, _ = fit(memory, config.worker.rollout, free=free, total=total)
    peaks = Peaks()
    ended = None
    with AllocatesLargeResults() as mode:
        try:
            run(config, Processing(str(folder)), case, peaks)
        except torch.OutOfMemoryError as error:
            ended = str(error).partition(". ")[0]
    return peaks, memory, refused, ended, mode.operations


def main(name: str) -> None:
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cepo.hardware import reserve_memory_in_growing_segments
    from cepo.workers.memory import bound_in_passes

    if os.environ.get("CEPO_DRY_SEGMENTS") != "fixed":
        reserve_memory_in_growing_segments()
    case = CASES[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    replace_kernels()
    with tempfile.TemporaryDirectory() as folder:
        write_model(case.model, Path(folder))
        peaks, memory, refused, ended, operations = counted(case, Path(folder))
    bound = f"bound {bound_in_passes(memory) / 2**30:.1f}"
    if ended is None:
        fits = peaks.reserved <= bound_in_passes(memory)
        refusal = "" if refused is None else f"; the estimate refuses it: {refused}"
        report(ok=fits and refused is None, found=f"GiB: {peaks}; {bound}; {operations:,} operations{refusal}")
        return
    verdict = "the estimate accepts it" if refused is None else f"the estimate refuses it: {refused}"
    report(ok=refused is not None, found=f"it does not fit ({ended}); {bound} GiB; {verdict}")


if __name__ == "__main__":
    main(sys.argv[1])
