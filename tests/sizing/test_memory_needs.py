"""The doctor's memory and disk: what a model, its training and its generator need, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import GIB, machine, on_devices, qwen3_vl_2b, training
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cepo.config import load_config
from cepo.config.schema import LoraConfig
from cepo.doctor.machine import Gpu
from cepo.doctor.run_checks import checkpoints_kept, engine_share, fits, memory_findings, weights_finding
from cepo.microgeo.model import model_config
from cepo.microgeo.tokenizer import build_tokenizer
from cepo.models.families.qwen3_vl import PUBLISHED_SIZES
from cepo.sizing.fitting import phases_on, settings_that_fit
from cepo.sizing.memory import (
    VALUE_BYTES,
    adapter_parameters,
    block_bytes_per_token,
    bytes_in_4_bits,
    checkpoint_bytes,
    generator_memory,
    head_bytes,
    passing_bytes_per_token,
    scoring_bytes,
    training_memory,
)
from cepo.sizing.needs import Needs, estimate_needs
from cepo.sizing.phases import Phases
from cepo.sizing.shape import shape_of
from cepo.sizing.table import RESPONSES, shapes_of


def test_qwen3_vl_2b_has_its_known_number_of_parameters() -> None:
    """It has 2,127,532,032 parameters, of which 406,957,056 in its vision tower."""
    layer = 3 * 2048 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128  # q, o and k with v; MLP; norms; q and k norms
    text = 151936 * 2048 + 28 * layer + 2048
    block = 4 * 1024 + (1024 * 3072 + 3072) + (1024 * 1024 + 1024) + (1024 * 4096 + 4096) + (4096 * 1024 + 1024)
    merger = (4096 * 4096 + 4096) + (4096 * 2048 + 2048)
    patches = (3 * 2 * 16 * 16 * 1024 + 1024) + 2304 * 1024
    vision = patches + 24 * block + (2 * 1024 + merger) + 3 * (2 * 4096 + merger)
    assert (layer, vision, text + vision) == (50_336_000, 406_957_056, 2_127_532_032)
    shape = qwen3_vl_2b(LoraConfig())
    assert (shape.largest_block, shape.vision_parameters, shape.parameters) == (layer, vision, text + vision)
    assert shape.outside_blocks == text + vision - 28 * layer - 24 * block


def test_qwen3_vl_2b_has_17_432_576_adapter_parameters() -> None:
    """The rank is 16, on 196 layers."""
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)  # q, o; k, v; gate, up, down
    assert len(shape.adapted) == 7 * 28
    assert adapter_parameters(shape.adapted, 16) == 16 * 28 * per_layer == 17_432_576


def test_qwen3_vl_2b_with_lora_needs_4_3_gb_of_weights() -> None:
    """It needs at most 3.5 GB of activations at 4 rows of 3072."""
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    estimate = training_memory(shape, training(lora_rank=16, compute_type="bf16"))
    assert estimate.weights == 2 * 2_127_532_032 + 4 * 17_432_576 == 4_324_794_368
    assert estimate.gathered == 2 * (151936 * 2048 + 2048 + 2 * 50_336_000)
    assert (estimate.gradients, estimate.optimizer, estimate.copies) == (69_730_304, 139_460_608, 0)
    tokens = 4 * 3072
    inputs = 28 * tokens * 2048 * 2
    one_block = tokens * (2 * (6 * 2048 + 4 * 2048 + 5 * 1024 + 4 * 6144) + 4 * (4 * 2048 + 2 * 3072))
    logits = (4 + 2) * 2**25
    assert estimate.activations == inputs + one_block + logits == 3_548_381_184
    assert estimate.total == 8_906_044_416


def test_qwen3_vl_2b_with_qlora_needs_2_2_gb_of_weights() -> None:
    """Each further device needs 1.0 GB more."""
    shape = qwen3_vl_2b(LoraConfig(rank=16, quantization="nf4"))
    in_4_bits = 28 * (3 * 2048 * 2048 + 3 * 2048 * 6144)
    assert shape.text_linear == in_4_bits == 1_409_286_144
    size = bytes_in_4_bits(double_quantization=True)
    assert (size, bytes_in_4_bits(double_quantization=False)) == (0.5 + 1 / 64 + 4 / 64 / 256, 0.5 + 4 / 64)
    one, two = (
        training_memory(shape, training(lora_rank=16, compute_type="bf16", bytes_in_4_bits=size, devices=devices))
        for devices in (1, 2)
    )
    packed, tower, adapter = 727_007_232, 2 * 406_957_056, 4 * 17_432_576
    rest = 2 * (2_127_532_032 - 406_957_056 - in_4_bits)
    assert one.weights == packed + tower + rest + adapter == 2_233_229_312
    assert two.weights == packed + tower + (rest + adapter) // 2
    assert one.gathered == rest + 2 * 2048 * 6144  # embeddings and norms, and one weight that is multiplied with
    assert one.optimizer == 8 * 17_432_576


def test_full_fine_tuning_needs_16_bytes_per_weight() -> None:
    """The model is Qwen3-VL-2B; on 2 devices it needs half of that."""
    shape = qwen3_vl_2b(LoraConfig())
    one, two = (training_memory(shape, training(compute_type="bf16", devices=devices)) for devices in (1, 2))
    assert one.weights + one.gradients + one.optimizer == 16 * 2_127_532_032
    assert two.weights + two.gradients + two.optimizer == 8 * 2_127_532_032
    assert one.gathered == two.gathered
    teacher = training_memory(shape, training(freeze_vision_tower=True, weight_copies=1))
    assert teacher.copies == teacher.gradients == 4 * (2_127_532_032 - 406_957_056)


@pytest.mark.parametrize(
    ("lora", "vision_is_whole"),
    [
        (LoraConfig(rank=16), True),
        (LoraConfig(rank=16, exclude_modules=None), False),  # its layers get adapters too
    ],
)
def test_a_frozen_vision_tower_is_whole_on_each_of_8_devices(lora: LoraConfig, vision_is_whole: bool) -> None:
    shape = qwen3_vl_2b(lora)
    assert shape.adapts_vision == (not vision_is_whole)
    estimate = training_memory(shape, training(lora_rank=16, compute_type="bf16", devices=8))
    whole = 406_957_056 if vision_is_whole else 0
    adapter = adapter_parameters(shape.adapted, 16)
    assert estimate.weights == 2 * whole - (-(2 * (2_127_532_032 - whole) + 4 * adapter) // 8)


def test_adamw_bf16_takes_8_bytes_per_weight() -> None:
    """Moments in bf16 take 4."""
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    settings = {"lora_rank": 16, "trained_type": "bf16", "compute_type": "bf16"}
    plain, compensated = (
        training_memory(shape, training(**settings, optimizer=name)) for name in ("adamw", "adamw_bf16")
    )
    assert (plain.optimizer, compensated.optimizer) == (4 * 17_432_576, 8 * 17_432_576)
    assert checkpoint_bytes(1000, "bf16", 0, "adamw_bf16") == 10_000


def test_the_embedded_model_trains_in_21_mb() -> None:
    """Its 1,315,392 parameters take 21 MB of weights, gradients and moments."""
    shape = shape_of(model_config(build_tokenizer()), lora=LoraConfig(rank=4))
    layer = 3 * 128 * 128 + 3 * 128 * 384 + 2 * 128 + 2 * 32
    assert shape.parameters - shape.vision_parameters == 500 * 128 + 4 * layer + 128 == 851_840
    assert (shape.parameters, shape.vocabulary, len(shape.adapted)) == (1_315_392, 500, 28)
    estimate = training_memory(shape, training(rows=2, prompt_tokens=10, response_tokens=20))
    assert estimate.weights + estimate.gradients + estimate.optimizer == 16 * 1_315_392 == 21_046_272
    assert block_bytes_per_token(shape.text, 4) == 4 * (3136 + 896) == 16_128
    text = 4 * 60 * 128 * 4 + 60 * 16_128
    patches = 2 * 10 * 4
    tower = 2 * patches * 64 * 4 + patches * 4 * (6 * 64 + 9 * 64 + 4 * 128 + 4 * 64 + 4 * 64)
    assert estimate.activations == text + tower + (4 + 2) * (2 * 20 * 500)


def test_a_forward_pass_keeps_half_to_all_of_its_bound() -> None:
    """The bound is that of activations."""
    import transformers

    config = model_config(build_tokenizer())
    shape = shape_of(config, lora=LoraConfig())
    model = transformers.Qwen3VLForConditionalGeneration(config).float()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.randint(0, 200, (4, 96)), use_cache=False)
    measured = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
    bound = 4 * 4 * 96 * block_bytes_per_token(shape.text, 4)
    assert 0.5 * bound < measured <= bound


class LargestLive(TorchDispatchMode):
    """The most bytes that tensors made inside it held at one time, views of the model's weights left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.most = 0
        self._weights = {StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()}
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if StorageWeakRef(storage) not in self._weights:
                    self._live.setdefault(StorageWeakRef(storage), storage.nbytes())
        self._live = {storage: size for storage, size in self._live.items() if not storage.expired()}
        self.most = max(self.most, sum(self._live.values()))
        return result


@pytest.mark.parametrize("compute_type", ["bf16", "fp32"])
def test_a_gradientless_pass_holds_half_to_all_of_its_bound(compute_type: str) -> None:
    """The bound is that of scoring."""
    import transformers

    config = model_config(build_tokenizer())
    shape = shape_of(config, lora=LoraConfig())
    model = transformers.Qwen3VLForConditionalGeneration(config)
    model = model.bfloat16() if compute_type == "bf16" else model.float()
    ids = torch.randint(0, 200, (4, 512))
    with torch.no_grad(), LargestLive(model) as live:
        model.model(input_ids=ids, use_cache=False)
    bound = ids.numel() * passing_bytes_per_token(shape.text, VALUE_BYTES[compute_type])
    assert 0.5 * bound < live.most <= bound


def test_scoring_with_qwen3_vl_2b_takes_at_most_3_5_gb() -> None:
    """The pass has 16 rows of 3072 tokens; without rows it takes nothing."""
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    attention = 2 * (4 * 2048 + 5 * 1024) + 12 * 2048
    assert passing_bytes_per_token(shape.text, 2) == 2 * 5 * 2048 + attention == 71_680
    settings = {"lora_rank": 16, "compute_type": "bf16"}
    assert scoring_bytes(shape, training(**settings, scoring_rows=16)) == 16 * 3072 * 71_680 == 3_523_215_360
    assert scoring_bytes(shape, training(**settings)) == 0


def test_scoring_long_rows_takes_more_than_updating_one() -> None:
    """The pass has 16 rows of 8192 tokens of the 2B model."""
    lengths = {"lora_rank": 16, "compute_type": "bf16", "rows": 1, "response_tokens": 7168}
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    update = training_memory(shape, training(**lengths))
    both = training_memory(shape, training(**lengths, scoring_rows=16))
    assert both.scoring == 16 * 8192 * 71_680 > both.activations == update.activations
    assert both.total - both.loaded == both.optimizer + both.gathered + both.scoring
    assert both.total > update.total


@pytest.mark.parametrize(
    ("offloaded", "sampling", "scoring"),
    [
        ({}, 0, 0),
        ({"offload_optimizer": True}, 16, 16),
        ({"offload_params": True}, 8, 0),
        ({"offload_params": True, "offload_optimizer": True}, 24, 16),
    ],
)
def test_offloading_between_phases_leaves_its_known_bytes(
    offloaded: dict[str, bool], sampling: int, scoring: int
) -> None:
    """It leaves 8 bytes per float32 pair of moments and 4 per weight."""
    shape = qwen3_vl_2b(LoraConfig())
    estimate = training_memory(shape, training(compute_type="bf16", devices=2, **offloaded))
    share = 2_127_532_032 // 2
    assert (estimate.leaves_while_sampling, estimate.leaves_while_scoring) == (
        sampling * share // 2,
        scoring * share // 2,
    )
    away = training_memory(shape, training(compute_type="bf16", cpu_offload=True, **offloaded))
    assert (away.weights, away.gradients, away.optimizer, away.kept) == (0, 0, 0, 0)
    assert away.gathered == estimate.gathered


def test_a_generator_of_qwen3_vl_2b_needs_4_6_gb() -> None:
    """It has one request of 3072 tokens in bf16."""
    shape = qwen3_vl_2b(LoraConfig())
    assert generator_memory(shape, "bf16", 3072) == 2 * (2_127_532_032 + 2 * 28 * 1024 * 3072) == 4_607_385_600


def test_a_checkpoint_of_1000_weights_has_12_kb() -> None:
    """The weights are float32; with a teacher's copy it has 16 kB."""
    assert (checkpoint_bytes(1000, "fp32", 0), checkpoint_bytes(1000, "fp32", 1)) == (12_000, 16_000)
    assert checkpoint_bytes(1000, "bf16", 1, weights_only=True) == 2_000


def test_memory_fails_at_11_of_10_gib() -> None:
    """It warns where only the bound exceeds it, and passes below."""
    marks = [fits(certain * GIB, 4 * GIB, 10 * GIB, "memory").mark for certain in (11, 7, 6)]
    assert marks == ["fail", "warn", "ok"]
    assert "lora.rank" in fits(11 * GIB, 0, 10 * GIB, "memory").remedy
    assert [engine_share(5 * GIB, share * GIB, 0).mark for share in (4, 5)] == ["fail", "ok"]


def test_beside_vllm_qwen3_vl_2b_fits_80_gib_at_0_6() -> None:
    """It does not fit at a share of 0.95."""
    card = Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB)
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    needs = Needs(
        model=shape,
        actor=training_memory(shape, training(lora_rank=16, compute_type="bf16")),  # 5.2 GiB, 8.8 with activations
        critic=None,
        generator=generator_memory(shape, "bf16", 3072),
        checkpoint=0,
    )
    marks = {}
    for share in ("0.6", "0.95", "0.01"):
        arguments = ["config=configs/geo3k/base.yaml", f"worker.rollout.gpu_memory_utilization={share}"]
        config = load_config(arguments)
        found = memory_findings(needs, config, machine(gpus=(card,)), with_vllm=True, shape_of_path=shapes_of("2B"))
        marks[share] = [each.mark for each in found if each.mark != "info"]
    assert marks == {"0.6": ["ok", "ok"], "0.95": ["ok", "fail"], "0.01": ["fail", "fail"]}


def on_a_card(size: str, gigabytes: float, *settings: str) -> tuple[Phases, str]:
    """What a card makes of the paper's setting with these changes, and which setting would fit where it is refused."""
    config = load_config(["config=configs/geo3k/cepo.yaml", *settings])
    shapes = shapes_of(size)
    card = {"free": int((gigabytes - 0.5) * 1e9), "total": int(gigabytes * 1e9), "with_vllm": True}
    needs = estimate_needs(config, cpu_engine=False, shape_of_path=shapes)
    return phases_on(config, needs, **card), settings_that_fit(config, **card, shape_of_path=shapes)


def test_full_fine_tuning_of_2b_on_80_gb_sleeps_and_fits() -> None:
    """It fits because gradients are freed before vLLM wakes up."""
    phases, _ = on_a_card("2B", 80, "worker.actor.model.lora.rank=0")
    assert phases.in_words == "sleeps"
    gradients = 4 * 2_127_532_032
    assert 0 < phases.sampling_left < gradients, "with the gradients of the last update there the wake-up would fail"


def test_full_fine_tuning_of_2b_on_48_gb_is_refused() -> None:
    """The message names the share that would fit."""
    phases, fitting = on_a_card("2B", 48, "worker.actor.model.lora.rank=0")
    assert phases.refused is not None
    assert "while responses are sampled" in phases.refused
    assert fitting == "worker.rollout.gpu_memory_utilization=0.45"
    share = (fitting, "worker.actor.model.lora.rank=0")
    assert on_a_card("2B", 48, *share)[0].in_words == "sleeps"


@pytest.mark.parametrize(
    ("settings", "fitting"),
    [
        (["worker.actor.model.lora.rank=0"], "worker.actor.fsdp.enable_cpu_offload=true"),
        (["worker.rollout.gpu_memory_utilization=0.05"], "worker.rollout.gpu_memory_utilization=0.15"),
        (
            ["worker.rollout.gpu_memory_utilization=0.9", "worker.rollout.sleep=never"],
            "worker.rollout.gpu_memory_utilization=0.75",
        ),
    ],
)
def test_a_refused_run_names_one_change_that_makes_it_fit(settings: list[str], fitting: str) -> None:
    """The model is 4B on 80 GB."""
    phases, found = on_a_card("4B", 80, *settings)
    assert not phases.fits
    assert found == fitting
    kept = [each for each in settings if each.partition("=")[0] not in found]
    assert on_a_card("4B", 80, *kept, *found.split())[0].fits


def test_a_larger_card_never_trains_less() -> None:
    """Longer responses never train more. The table is the page's, which tests/repository/test_docs.py holds to the code."""
    marks = {"refused": 0, "sleeps": 1, "fits": 2}
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    table = page.partition("<!-- memory: begin, generated -->\n")[2].partition("\n<!-- memory: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == len(PUBLISHED_SIZES) * 3 * len(RESPONSES)
    grades = [[marks[cell.split()[-2] if " " in cell else cell] for cell in row[3:]] for row in rows]
    for grade in grades:
        assert grade == sorted(grade)
    for first in range(0, len(rows), len(RESPONSES)):
        for shorter, longer in zip(rows[first : first + 2], rows[first + 1 : first + 3], strict=True):
            for short_cell, long_cell in zip(shorter[3:], longer[3:], strict=True):
                if short_cell.split()[:-1] == long_cell.split()[:-1] and " " in long_cell:
                    assert int(short_cell.split()[-1]) >= int(long_cell.split()[-1])


def test_checkpoints_on_disk_are_counted_from_the_settings() -> None:
    """50 steps saved every 10 keep 5, or 4 under a limit of 3, and the last alone without a frequency."""
    assert (checkpoints_kept(10, -1, 50), checkpoints_kept(10, 3, 50), checkpoints_kept(-1, 3, 50)) == (5, 4, 1)
    assert (checkpoints_kept(10, 3, None), checkpoints_kept(10, 9, 50)) == (4, 5)


def test_a_checkpoint_folder_without_all_shards_fails(tmp_path: Path) -> None:
    """It lacks 1 of 2 shards, or all weights."""
    assert weights_finding(str(tmp_path)).mark == "fail"
    (tmp_path / "a.safetensors").touch()
    assert weights_finding(str(tmp_path)).mark == "ok"
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    finding = weights_finding(str(tmp_path))
    assert finding.mark == "fail"
    assert finding.found.endswith("lacks b.safetensors")


def test_without_a_gpu_4_workers_need_4_times_the_memory_of_one() -> None:
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    actor = training_memory(shape, training(lora_rank=16))
    needs = Needs(model=shape, actor=actor, critic=None, generator=GIB, checkpoint=0)

    def mark(workers: int, free: int) -> str:
        config = on_devices(n_gpus_per_node=workers)
        return memory_findings(needs, config, machine(memory_free=free), with_vllm=False)[-1].mark

    certain = actor.certain + GIB
    assert mark(1, certain) == "warn"
    assert [mark(4, free) for free in (4 * certain - 1, 4 * certain)] == ["fail", "warn"]
    assert mark(4, 4 * (certain + actor.activations)) == "ok"


def test_the_head_holds_6_bytes_per_logit_of_its_chunk() -> None:
    """A divergence holds 56 bytes of its own."""
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    chunks = {"head_chunk_elements": 2**28, "divergence_chunk_elements": 2**26}
    many = 4 * 2048  # tokens of 4 rows
    assert head_bytes(shape, training(head_chunk_elements=2**28), 4) == 6 * 2**28 < 6 * many * 151_936
    assert head_bytes(shape, training(**chunks), 4) == 56 * 2**26
    few = training(response_tokens=20, **chunks)
    assert head_bytes(shape, few, 2) == 56 * 2 * 20 * 151_936
