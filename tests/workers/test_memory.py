"""The memory estimate, worked out by hand for Qwen3-VL-2B, and what is refused by it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints.families import FAMILIES

from cepo.config import load_config
from cepo.config.worker_schema import LoraConfig, RolloutConfig
from cepo.errors import ConfigError
from cepo.workers import memory as sizing
from cepo.workers.memory import (
    ASLEEP_BYTES,
    Memory,
    ModelShape,
    Stack,
    estimate_memory,
    fit,
    require_memory,
    shape_of,
    with_sleep_decided,
)
from cepo.workers.pass_sizes import with_numbers
from lab.support.live_tensors import LiveTensors
from lab.support.published_models import PUBLISHED_SIZES, published_config
from lab.worlds.model import model_config
from lab.worlds.tokenizer import build_tokenizer

GIB = 2**30
PARAMETERS, TOWER, ADAPTER = 2_127_532_032, 406_957_056, 17_432_576
IN_FLOAT32 = "worker.actor.fsdp.torch_dtype=fp32"
FULL = ["worker.actor.model.lora.rank=0", IN_FLOAT32]


@cache
def published_shape(lora: LoraConfig) -> ModelShape:
    """Qwen3-VL-2B's shape with this adapter."""
    return shape_of(published_config("2B"), lora=lora)


def memory(*settings: str) -> Memory:
    """What the paper's setting with these changes needs of Qwen3-VL-2B."""
    config = load_config(["config=configs/geo3k/cepo.yaml", *settings])
    return estimate_memory(
        with_numbers(config), with_vllm=True, shape_of_model=lambda model, lora: published_shape(lora)
    )


def test_qwen3_vl_2b_has_its_known_number_of_parameters() -> None:
    """It has 2,127,532,032 parameters, of which 406,957,056 in its vision tower."""
    layer = 3 * 2048 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128  # q, o and k with v; MLP; norms; q and k norms
    text = 151936 * 2048 + 28 * layer + 2048
    block = 4 * 1024 + (1024 * 3072 + 3072) + (1024 * 1024 + 1024) + (1024 * 4096 + 4096) + (4096 * 1024 + 1024)
    merger = (4096 * 4096 + 4096) + (4096 * 2048 + 2048)
    patches = (3 * 2 * 16 * 16 * 1024 + 1024) + 2304 * 1024
    vision = patches + 24 * block + (2 * 1024 + merger) + 3 * (2 * 4096 + merger)
    assert (layer, vision, text + vision) == (50_336_000, TOWER, PARAMETERS)
    shape = published_shape(LoraConfig())
    assert (shape.block, shape.vision, shape.parameters) == (layer, vision, text + vision)
    assert shape.outside == text + vision - 28 * layer - 24 * block


def test_qwen2_5_vl_3b_has_its_known_number_of_parameters() -> None:
    """It has 3,754,622,976 parameters, of which 668,684,288 in its vision tower."""
    attention = 2 * 2048 * 2048 + 2 * 2048 * 256 + 2048 + 2 * 256  # q and o, k and v; biases of q, k and v
    layer = attention + 3 * 2048 * 11008 + 2 * 2048
    text = 151936 * 2048 + 36 * layer + 2048
    shape = shape_of(published_config("3B"), lora=LoraConfig())
    assert (text, shape.vision, shape.parameters) == (3_085_938_688, 668_684_288, 3_754_622_976)


def test_qwen3_vl_2b_has_17_432_576_adapter_parameters() -> None:
    """The rank is 16, on 196 layers; DoRA adds a magnitude for each output."""
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)  # q, o; k, v; gate, up, down
    outputs = 2 * 2048 + 2 * 1024 + 2 * 6144 + 2048
    assert published_shape(LoraConfig(rank=16)).adapter == 16 * 28 * per_layer == ADAPTER
    assert published_shape(LoraConfig(rank=16, use_dora=True)).adapter == ADAPTER + 28 * outputs
    assert published_shape(LoraConfig()).adapter == 0


def test_lora_needs_4_3_gb_of_weights_and_6_6_gb_in_a_pass() -> None:
    """The update's pass has 4 rows of 3072 tokens; the features of 32 prompts' images are kept."""
    found = memory(IN_FLOAT32)
    assert found.weights == 2 * PARAMETERS + 4 * ADAPTER == 4_324_794_368
    assert (found.optimizer, found.away, found.checkpoint) == (8 * ADAPTER, 0, 12 * ADAPTER)
    assert found.engine == 2 * (PARAMETERS + 2 * 28 * 1024 * 3072) == 4_607_385_600
    block = 2 * (6 * 2048 + 4 * 2048 + 5 * 1024 + 4 * 6144) + 4 * (4 * 2048 + 2 * 3072)
    gathered = 2 * (published_shape(LoraConfig()).outside + 2 * 50_336_000)
    assert found.least_pass == 4 * ADAPTER + gathered
    activations = 4 * 3072 * (28 * 2048 * 2 + block) + (4 + 2) * 2**28
    assert found.largest_pass == 4 * ADAPTER + gathered + activations + 32 * 1024 * 4 * 2048 * 2 == 6_597_241_856


@pytest.mark.parametrize(
    ("family", "entries", "expected"),
    [
        ("qwen3_vl", {}, 4),
        ("internvl", {}, 4),
        ("smolvlm", {"scale_factor": 3}, 9),  # SmolVLM2 2.2B
        ("smolvlm", {"scale_factor": 4}, 16),  # SmolVLM2 500M
        ("gemma3", {"mm_tokens_per_image": 1}, 16),
        ("gemma4", {}, 9),
        ("lfm2_vl", {}, 4),
        ("llava_onevision", {}, 4),  # merges none, and counts as the others
    ],
)
def test_a_token_of_an_image_stands_for_the_familys_patches(
    family: str, entries: dict[str, int], expected: int
) -> None:
    """Gemma 3's tiny tower has 4 x 4 patches: one token stands for all of them. SmolVLM merges 3 x 3 or 4 x 4 patches."""
    config = FAMILIES[family]().config
    for name, value in entries.items():
        setattr(config, name, value)
    assert shape_of(config, lora=LoraConfig(rank=0)).patches_per_token == expected


def test_scoring_16_long_rows_takes_more_than_updating_one() -> None:
    """A row has 8192 tokens, and a pass without gradient has no gradients on the device."""
    found = memory(IN_FLOAT32, "worker.actor.micro_batch_size_per_device_for_update=1", "data.max_response_length=7168")
    features = 32 * 1024 * 4 * 2048 * 2
    gathered = found.least_pass - 4 * ADAPTER
    assert found.largest_pass == gathered + 16 * 8192 * 157_696 // 2 + features


def test_full_fine_tuning_needs_12_bytes_per_weight_and_8_more() -> None:
    """The step has the gradients and the roots of the second moments; two devices need half."""
    one, two = memory(*FULL), memory(*FULL, "trainer.n_gpus_per_node=2")
    assert one.weights + one.optimizer == 12 * PARAMETERS == 2 * (two.weights + two.optimizer)
    assert one.least_pass == 8 * PARAMETERS
    frozen = memory(*FULL, "worker.actor.model.freeze_vision_tower=true")
    assert frozen.optimizer == 8 * (PARAMETERS - TOWER)
    compensated = memory(FULL[0], "worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16")
    assert (compensated.weights, compensated.optimizer) == (2 * PARAMETERS, 8 * PARAMETERS)
    shape = published_shape(LoraConfig())
    gathered = 2 * (shape.outside + 2 * shape.block)
    reduced = (2 + 4) * (shape.outside + shape.block)
    head = 2 * (2 + 4) * 151_936 * 2048  # a sum, a chunk's part; the gradient, and the embeddings'
    assert gathered + reduced + head > 24 * 151_936 * 2048  # which `adamw_bf16` has of one tensor
    assert compensated.least_pass == 2 * PARAMETERS + gathered + reduced + head


def test_weights_are_shared_by_the_devices_of_one_machine() -> None:
    """Two machines of two hold a whole copy each; -1 spreads one copy over both."""
    one_machine = memory(*FULL, "trainer.n_gpus_per_node=2")
    two_machines = memory(*FULL, "trainer.n_gpus_per_node=2", "trainer.nnodes=2")
    spread = memory(*FULL, "trainer.n_gpus_per_node=2", "trainer.nnodes=2", "worker.actor.fsdp.fsdp_size=-1")
    assert two_machines.weights == one_machine.weights == 2 * spread.weights
    assert two_machines.optimizer == one_machine.optimizer == 2 * spread.optimizer


def test_qlora_needs_2_2_gb_of_weights() -> None:
    """Its 4-bit weights and its frozen tower are whole on every device."""
    qlora = [IN_FLOAT32, "worker.actor.model.lora.quantization=nf4"]
    in_4_bits = 28 * (3 * 2048 * 2048 + 3 * 2048 * 6144)
    assert published_shape(LoraConfig(rank=16)).text_linear == in_4_bits == 1_409_286_144
    assert sizing.bytes_in_4_bits(double_quantization=False) == 0.5 + 4 / 64
    assert sizing.bytes_in_4_bits(double_quantization=True) == 0.5 + 1 / 64 + 4 / 64 / 256
    rest = 2 * (PARAMETERS - TOWER - in_4_bits) + 4 * ADAPTER
    assert memory(*qlora).weights == 727_007_232 + 2 * TOWER + rest == 2_233_229_312
    assert memory(*qlora, "trainer.n_gpus_per_node=2").weights == 727_007_232 + 2 * TOWER + rest // 2


def test_a_tower_without_adapters_is_whole_on_each_of_8_devices() -> None:
    eight = [IN_FLOAT32, "trainer.n_gpus_per_node=8"]
    frozen = memory(*eight)
    assert frozen.weights == 2 * TOWER - (-(2 * (PARAMETERS - TOWER) + 4 * ADAPTER) // 8)
    adapted = memory(*eight, "worker.actor.model.lora.exclude_modules=null")
    assert adapted.weights < frozen.weights - 2 * TOWER * 6 // 8


@pytest.mark.parametrize(
    ("moved", "away"),
    [
        (["offload.offload_optimizer"], 8),
        (["offload.offload_params"], 4),
        (["offload.offload_optimizer", "offload.offload_params"], 12),
        (["fsdp.enable_cpu_offload"], 0),
    ],
)
def test_what_leaves_the_device_is_counted_per_float32_weight(moved: list[str], away: int) -> None:
    """It is 8 bytes of moments and 4 of weights while responses are sampled; with FSDP's offload nothing is there."""
    found = memory(*FULL, *(f"worker.actor.{name}=true" for name in moved))
    assert found.away == away * PARAMETERS
    if away == 0:
        assert (found.weights, found.optimizer) == (0, 0)


def test_a_teachers_copy_takes_4_bytes_per_weight() -> None:
    without, with_copy = memory(*FULL), memory(*FULL, "algorithm.disable_kl=false")
    assert with_copy.weights - without.weights == 4 * PARAMETERS
    assert with_copy.checkpoint - without.checkpoint == 4 * PARAMETERS
    assert memory(*FULL, "trainer.save_model_only=true").checkpoint == 4 * PARAMETERS


def tiny_model() -> tuple[Any, Stack]:
    import transformers

    config = model_config(build_tokenizer())
    return transformers.Qwen3VLForConditionalGeneration(config), shape_of(config, lora=LoraConfig()).text_stack


def test_a_forward_pass_keeps_half_to_all_of_its_bound() -> None:
    model, stack = tiny_model()
    model.float()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.randint(0, 200, (4, 96)), use_cache=False)
    measured = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
    bound = 4 * 4 * 96 * stack.kept_per_token(4)
    assert 0.5 * bound < measured <= bound


@pytest.mark.heavy
@pytest.mark.parametrize("value_bytes", [2, 4])
def test_a_gradientless_pass_holds_half_to_all_of_its_bound(value_bytes: int) -> None:
    model, stack = tiny_model()
    model.to(torch.bfloat16 if value_bytes == 2 else torch.float32)
    ids = torch.randint(0, 200, (4, 512))
    with torch.no_grad(), LiveTensors(known=model.parameters()) as live:
        model.model(input_ids=ids, use_cache=False)
    bound = ids.numel() * stack.kept_per_token(value_bytes) // 2
    assert 0.5 * bound < live.peak <= bound


NEEDS = Memory(
    weights=5 * GIB, optimizer=3 * GIB, away=GIB, engine=6 * GIB, least_pass=6 * GIB, largest_pass=10 * GIB,
    checkpoint=0, parameters=0,
)  # fmt: skip
ASLEEP = RolloutConfig(gpu_memory_utilization=0.5, sleep=True)
AUTO = RolloutConfig(gpu_memory_utilization=0.5)
AWAKE = RolloutConfig(gpu_memory_utilization=0.5, sleep=False)
SMALL = RolloutConfig(gpu_memory_utilization=0.15, sleep=True)


BOUND = 21 * GIB


@pytest.mark.parametrize(
    ("rollout", "free", "total", "reason"),
    [
        (ASLEEP, 27, 40, None),
        (ASLEEP, 26, 40, "sampling beside the generator's 20.0 GiB takes 27.0 GiB before any activation"),
        (AWAKE, 34, 40, None),
        (AWAKE, 33, 40, "beside the generator's 20.0 GiB takes 34.0 GiB before any activation: 1.0 GiB too much"),
        (ASLEEP, 11, 11, "vLLM's share is 5.5 GiB, but its weights and one request need 6.0 GiB"),
        (SMALL, 14, 40, None),
        (SMALL, 13, 40, "takes 14.0 GiB before any activation: 1.0 GiB too much"),
    ],
)
def test_a_run_is_refused_by_what_does_not_depend_on_lengths(
    rollout: RolloutConfig, free: int, total: int, reason: str | None
) -> None:
    refused, _ = fit(NEEDS, rollout, free=free * GIB, total=total * GIB)
    assert (refused is None) == (reason is None)
    assert (reason or "") in str(refused)


def test_activations_that_may_not_fit_are_short_but_not_refused() -> None:
    """A sleeping engine keeps 2 GiB; another generator than vLLM cannot sleep, and its weights stay.

    The trainer's allocator takes up to 5 + 3 + 1.3 x 10 GiB.
    """
    needed, total = 21 * GIB, 20 * GIB
    other = NEEDS._replace(with_vllm=False)
    assert fit(NEEDS, ASLEEP, free=needed + ASLEEP_BYTES, total=total)[1] == 0
    assert fit(NEEDS, ASLEEP, free=needed, total=total)[1] == ASLEEP_BYTES
    assert fit(NEEDS, AWAKE, free=needed, total=total)[1] == 10 * GIB
    assert fit(other, ASLEEP, free=needed, total=total)[1] == 6 * GIB


@pytest.mark.parametrize(("free", "decided"), [(BOUND + 20 * GIB, False), (BOUND + 20 * GIB - 1, True)])
def test_vllm_sleeps_unless_it_fits_beside_the_trainers_bound(
    free: int, decided: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's bound is 5 + 3 + 1.3 x 10 GiB, and vLLM has half of 40 GiB. What is set is never changed."""
    caplog.set_level(logging.INFO, logger="cepo")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 40 * GIB))
    device = torch.device("cuda", 0)
    assert with_sleep_decided(NEEDS, AUTO, device).sleep is decided
    assert f"worker.rollout.sleep={decided}: vLLM's 20.0 GiB {'does not fit' if decided else 'fits'}" in caplog.text
    assert with_sleep_decided(NEEDS, ASLEEP, device) == ASLEEP
    assert with_sleep_decided(NEEDS, AWAKE, device) == AWAKE
    assert with_sleep_decided(NEEDS, AUTO, torch.device("cpu")) == AUTO
    assert fit(NEEDS, AUTO, free=free, total=40 * GIB) == fit(
        NEEDS, ASLEEP if decided else AWAKE, free=free, total=40 * GIB
    )


def test_a_worker_warns_or_ends_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="cepo")  # a test before may have asked for less
    device = torch.device("cuda", 0)
    for free in (39, 34):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * GIB, 40 * GIB))
        caplog.clear()
        require_memory(NEEDS, replace(AWAKE, gpu_memory_utilization=0.45), device)
        assert ("memory may be short by up to 5.0 GiB" in caplog.text) == (free == 34)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (33 * GIB, 40 * GIB))
    with pytest.raises(ConfigError, match=r"does not fit on this GPU .* what helps: LoRA"):
        require_memory(NEEDS, AWAKE, device)


def test_in_the_documents_table_a_larger_card_never_trains_less() -> None:
    """Longer responses never train more. That the table is the code's is held by tests/repository/test_repository.py."""
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    table = page.partition("<!-- memory: begin, generated -->\n")[2].partition("\n<!-- memory: end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][3:] for line in table.splitlines()[2:]]
    rows = [[0 if cell == "no" else int(cell.split()[-1]) for cell in row] for row in cells]
    assert len(rows) == len(PUBLISHED_SIZES) * 3 * 3
    assert all(row == sorted(row) for row in rows)
    for first in range(0, len(rows), 3):
        for shorter, longer in zip(rows[first : first + 2], rows[first + 1 : first + 3], strict=True):
            assert all(short >= long for short, long in zip(shorter, longer, strict=True))
