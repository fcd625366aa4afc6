"""The memory estimate, worked out by hand for Qwen3-VL-2B, and what is refused by it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from cepo.config import load_config
from cepo.config.worker_schema import RolloutConfig
from cepo.errors import ConfigError
from cepo.workers.memory import (
    ASLEEP_BYTES,
    MEASURED,
    Memory,
    bound_in_passes,
    estimate_memory,
    fit,
    require_memory,
    with_sleep_decided,
)
from cepo.workers.pass_sizes import with_numbers
from testing.published_models import published_shape

GIB = 2**30
PARAMETERS = 2_127_532_032
TOWER = 406_957_056
ADAPTER = 17_432_576
IN_FLOAT32 = "worker.actor.fsdp.torch_dtype=fp32"
FULL = ["worker.actor.model.lora.rank=0", IN_FLOAT32]


def memory(*settings: str, size: str = "2B") -> Memory:
    """What the paper's setting with these changes needs of a published model."""
    config = load_config(["config=configs/geo3k/cepo.yaml", *settings])
    return estimate_memory(with_numbers(config), with_vllm=True, shape_of_model=lambda model: published_shape(size))


def test_qwen3_vl_2b_has_its_known_number_of_parameters() -> None:
    """It has 2,127,532,032 parameters, of which 406,957,056 in its vision tower."""
    layer = 3 * 2048 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128  # q, o and k with v; MLP; norms; q and k norms
    text = 151936 * 2048 + 28 * layer + 2048
    block = 4 * 1024 + (1024 * 3072 + 3072) + (1024 * 1024 + 1024) + (1024 * 4096 + 4096) + (4096 * 1024 + 1024)
    merger = (4096 * 4096 + 4096) + (4096 * 2048 + 2048)
    patches = (3 * 2 * 16 * 16 * 1024 + 1024) + 2304 * 1024
    vision = patches + 24 * block + (2 * 1024 + merger) + 3 * (2 * 4096 + merger)
    assert layer == 50_336_000
    assert vision == TOWER
    assert text + vision == PARAMETERS
    shape = published_shape("2B")
    assert shape.vision == vision
    assert shape.parameters == text + vision
    assert shape.gathered == text + vision - 26 * layer - 24 * block, (
        "all but 26 of the 28 layers, and the tower's blocks"
    )


def test_an_adapter_has_the_sides_of_196_layers_for_each_rank() -> None:
    per_layer = 2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144)  # q, o; k, v; gate, up, down
    assert 16 * published_shape("2B").linear_sides == 16 * 28 * per_layer == ADAPTER


def test_lora_needs_4_3_gb_of_weights_and_6_9_gb_in_a_pass() -> None:
    """The larger pass scores 16 rows of 3072 tokens, each with half of a block's tensors, and has one chunk of logits."""
    needs = memory(IN_FLOAT32)
    assert needs.weights == 2 * PARAMETERS + 4 * ADAPTER == 4_324_794_368
    assert needs.optimizer == 8 * ADAPTER
    assert needs.away == 0
    assert needs.checkpoint == 12 * ADAPTER
    assert needs.engine == 2 * PARAMETERS
    assert needs.gradients == 4 * ADAPTER
    block = 2 * (14 * 2048 + 4 * 6144) + 32 * 2048
    gathered = 2 * published_shape("2B").gathered
    scoring = 16 * 3072 * block // 2
    assert scoring > 4 * 3072 * (28 * 2048 * 2 + block), "the update of 4 rows"
    assert needs.largest_pass == 4 * ADAPTER + gathered + scoring + (4 + 2) * 2**28 == 6_941_174_784


def test_all_weights_need_12_bytes_each_and_4_of_gradients() -> None:
    """Two devices need half. In its pass a gathered weight has its gradient twice in float32 and twice in bf16."""
    one_device = memory(*FULL)
    two_devices = memory(*FULL, "trainer.n_gpus_per_node=2")
    assert (
        one_device.weights + one_device.optimizer
        == 12 * PARAMETERS
        == 2 * (two_devices.weights + two_devices.optimizer)
    )
    assert one_device.gradients == 4 * PARAMETERS
    frozen = memory(*FULL, "worker.actor.model.freeze_vision_tower=true")
    assert frozen.optimizer == 8 * (PARAMETERS - TOWER)
    compensated = memory(FULL[0], "worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16")
    assert compensated.weights == 2 * PARAMETERS
    assert compensated.optimizer == 8 * PARAMETERS
    assert one_device.largest_pass - compensated.largest_pass == 2 * PARAMETERS, "the gradients are bf16"


def test_weights_are_shared_by_the_devices_of_one_machine() -> None:
    """Two machines of two hold a whole copy each; -1 spreads one copy over both."""
    one_machine = memory(*FULL, "trainer.n_gpus_per_node=2")
    two_machines = memory(*FULL, "trainer.n_gpus_per_node=2", "trainer.nnodes=2")
    spread = memory(*FULL, "trainer.n_gpus_per_node=2", "trainer.nnodes=2", "worker.actor.fsdp.fsdp_size=-1")
    assert two_machines.weights == one_machine.weights == 2 * spread.weights
    assert two_machines.optimizer == one_machine.optimizer == 2 * spread.optimizer


def test_qlora_needs_2_3_gb_of_weights() -> None:
    """Its 4-bit weights are whole on every device."""
    qlora = [IN_FLOAT32, "worker.actor.model.lora.quantization=nf4"]
    in_4_bits = 28 * (3 * 2048 * 2048 + 3 * 2048 * 6144)
    assert published_shape("2B").linear == in_4_bits == 1_409_286_144
    packed = in_4_bits * 9 // 16
    unpacked = 2 * (PARAMETERS - in_4_bits) + 4 * ADAPTER
    assert memory(*qlora).weights == packed + unpacked == 2_298_945_536
    assert memory(*qlora, "trainer.n_gpus_per_node=2").weights == packed + unpacked // 2


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
    needs = memory(*FULL, *(f"worker.actor.{name}=true" for name in moved))
    assert needs.away == away * PARAMETERS
    if away == 0:
        assert needs.weights == 0
        assert needs.optimizer == 0
        assert needs.gradients == 0


def test_a_teachers_copy_takes_4_bytes_per_weight() -> None:
    without = memory(*FULL)
    with_copy = memory(*FULL, "algorithm.disable_kl=false")
    assert with_copy.weights - without.weights == 4 * PARAMETERS
    assert with_copy.checkpoint - without.checkpoint == 4 * PARAMETERS
    assert memory(*FULL, "trainer.save_model_only=true").checkpoint == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("size", "settings", "reserved"),
    [
        ("2B", ["data.max_response_length=512"], 7.9),
        ("2B", [], 9.1),
        ("2B", ["worker.actor.model.lora.use_dora=true"], 10.2),
        ("2B", ["worker.actor.model.lora.quantization=nf4"], 7.3),
        ("2B", FULL[:1], 50.9),
        ("2B", ["algorithm.adv_estimator=gae"], 47.5),
        ("4B", ["trainer.n_gpus_per_node=8"], 9.0),
        ("4B", [FULL[0], "trainer.n_gpus_per_node=8"], 20.7),
    ],
)
def test_the_bound_is_1_to_2_times_what_was_reserved(size: str, settings: list[str], reserved: float) -> None:
    """GiB. The first row is a card's (docs/gpus.md), the others torch's allocator on the hollow GPU (lab/notes/gpu-dry.md)."""
    bound = bound_in_passes(memory(*settings, size=size)) / GIB
    assert reserved < bound < 2 * reserved
    if reserved == 7.9:
        assert f"{bound:.1f}" in MEASURED


NEEDS = Memory(
    weights=5 * GIB, optimizer=3 * GIB, away=GIB, engine=6 * GIB, gradients=6 * GIB, largest_pass=10 * GIB,
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
    bytes_needed = 21 * GIB
    total = 20 * GIB
    without_vllm = NEEDS._replace(with_vllm=False)
    assert fit(NEEDS, ASLEEP, free=bytes_needed + ASLEEP_BYTES, total=total)[1] == 0
    assert fit(NEEDS, ASLEEP, free=bytes_needed, total=total)[1] == ASLEEP_BYTES
    assert fit(NEEDS, AWAKE, free=bytes_needed, total=total)[1] == 10 * GIB
    assert fit(without_vllm, ASLEEP, free=bytes_needed, total=total)[1] == 6 * GIB


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
