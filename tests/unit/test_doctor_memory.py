"""The doctor's memory and disk: what a model, its training and its generator need, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doctor_cases import GIB, machine, on_devices, qwen3_vl_2b, training

from cepo.config import load_config
from cepo.config.schema import LoraConfig
from cepo.doctor.machine import Gpu
from cepo.doctor.memory import (
    adapter_parameters,
    block_bytes_per_token,
    checkpoint_bytes,
    generator_memory,
    training_memory,
)
from cepo.doctor.run import Needs, checkpoints_kept, engine_share, fits, memory_findings, weights_finding
from cepo.doctor.shape import shape_of
from cepo.microgeo.model import model_config
from cepo.microgeo.tokenizer import build_tokenizer


def test_qwen3_vl_2b_has_2_127_532_032_parameters_406_957_056_of_them_in_its_vision_tower() -> None:
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


def test_qwen3_vl_2b_gets_17_432_576_adapter_parameters_at_rank_16_on_196_layers() -> None:
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)  # q, o; k, v; gate, up, down
    assert len(shape.adapted) == 7 * 28
    assert adapter_parameters(shape.adapted, 16) == 16 * 28 * per_layer == 17_432_576


def test_qwen3_vl_2b_with_lora_needs_4_3_gb_of_weights_and_at_most_3_9_gb_of_activations_at_4_rows_of_3072() -> None:
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    estimate = training_memory(shape, training(lora_rank=16, compute_type="bf16"))
    assert estimate.weights == 2 * 2_127_532_032 + 4 * 17_432_576 == 4_324_794_368
    assert estimate.gathered == 2 * (151936 * 2048 + 2048 + 2 * 50_336_000)
    assert (estimate.gradients, estimate.optimizer, estimate.copies) == (69_730_304, 139_460_608, 0)
    tokens = 4 * 3072
    inputs = 28 * tokens * 2048 * 2
    one_block = tokens * (2 * (6 * 2048 + 4 * 2048 + 5 * 1024 + 4 * 6144) + 4 * (4 * 2048 + 2 * 3072))
    logits = 4 * 4 * 2**25
    assert estimate.activations == inputs + one_block + logits == 3_883_925_504
    assert estimate.total == 9_241_588_736


def test_full_fine_tuning_of_qwen3_vl_2b_needs_16_bytes_per_weight_and_half_of_that_on_2_devices() -> None:
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
def test_a_vision_tower_without_gradient_is_whole_on_each_of_8_devices(lora: LoraConfig, vision_is_whole: bool) -> None:
    shape = qwen3_vl_2b(lora)
    assert shape.adapts_vision == (not vision_is_whole)
    estimate = training_memory(shape, training(lora_rank=16, compute_type="bf16", devices=8))
    whole = 406_957_056 if vision_is_whole else 0
    adapter = adapter_parameters(shape.adapted, 16)
    assert estimate.weights == 2 * whole - (-(2 * (2_127_532_032 - whole) + 4 * adapter) // 8)


def test_adamw_bf16_takes_8_bytes_per_weight_where_bf16_moments_take_4() -> None:
    shape = qwen3_vl_2b(LoraConfig(rank=16))
    settings = {"lora_rank": 16, "trained_type": "bf16", "compute_type": "bf16"}
    plain, compensated = (
        training_memory(shape, training(**settings, optimizer=name)) for name in ("adamw", "adamw_bf16")
    )
    assert (plain.optimizer, compensated.optimizer) == (4 * 17_432_576, 8 * 17_432_576)
    assert checkpoint_bytes(1000, "bf16", 0, "adamw_bf16") == 10_000


def test_the_embedded_model_has_1_315_392_parameters_and_trains_in_21_mb_of_weights_gradients_and_moments() -> None:
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
    assert estimate.activations == text + tower + 4 * 4 * (2 * 20 * 500)


def test_a_forward_pass_keeps_between_half_and_all_of_the_activations_bound() -> None:
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


def test_a_generator_of_qwen3_vl_2b_with_one_request_of_3072_tokens_needs_4_6_gb_in_bf16() -> None:
    shape = qwen3_vl_2b(LoraConfig())
    assert generator_memory(shape, "bf16", 3072) == 2 * (2_127_532_032 + 2 * 28 * 1024 * 3072) == 4_607_385_600


def test_a_checkpoint_of_1000_float32_weights_has_12_kb_and_16_with_a_teachers_copy() -> None:
    assert (checkpoint_bytes(1000, "fp32", 0), checkpoint_bytes(1000, "fp32", 1)) == (12_000, 16_000)
    assert checkpoint_bytes(1000, "bf16", 1, weights_only=True) == 2_000


def test_memory_fails_at_11_of_10_gib_warns_where_only_the_bound_exceeds_it_and_passes_below() -> None:
    marks = [fits(certain * GIB, 4 * GIB, 10 * GIB, "memory").mark for certain in (11, 7, 6)]
    assert marks == ["fail", "warn", "ok"]
    assert "lora.rank" in fits(11 * GIB, 0, 10 * GIB, "memory").remedy
    assert [engine_share(5 * GIB, share * GIB, 0).mark for share in (4, 5)] == ["fail", "ok"]


def test_beside_vllm_qwen3_vl_2b_fits_an_80_gib_card_at_a_share_of_0_6_and_not_at_0_95() -> None:
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
        found = memory_findings(needs, load_config(arguments), machine(gpus=(card,)), with_vllm=True)
        marks[share] = [each.mark for each in found if each.mark != "info"]
    assert marks == {"0.6": ["ok", "ok"], "0.95": ["ok", "fail"], "0.01": ["fail", "ok"]}


def test_50_steps_saved_every_10_keep_5_checkpoints_or_4_under_a_limit_of_3_and_the_last_alone_without_a_frequency() -> (
    None
):
    assert (checkpoints_kept(10, -1, 50), checkpoints_kept(10, 3, 50), checkpoints_kept(-1, 3, 50)) == (5, 4, 1)
    assert (checkpoints_kept(10, 3, None), checkpoints_kept(10, 9, 50)) == (4, 5)


def test_a_checkpoint_folder_that_lacks_1_of_2_shards_or_all_weights_fails(tmp_path: Path) -> None:
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
