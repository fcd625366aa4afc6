"""The doctor's view of processors, GPUs, drivers and clusters."""

from __future__ import annotations

import socket

import pytest
from doctor_cases import GIB, machine, on_devices

from cepo.doctor.machine import Gpu, driver_finding, gpu_findings, machine_findings, usable_memory, wheel_serves
from cepo.doctor.start import ray_findings

WHEEL_CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
WHEEL_CUDA_12_4 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


def test_a_cuda_13_wheel_has_code_for_12_0() -> None:
    """A wheel for CUDA 12.4 has not, but PTX helps."""
    served = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert all(wheel_serves(capability, WHEEL_CUDA_13) for capability in served)
    assert not any(wheel_serves(capability, WHEEL_CUDA_12_4) for capability in [(10, 0), (12, 0)])
    assert wheel_serves((12, 0), (*WHEEL_CUDA_12_4, "compute_90"))
    assert wheel_serves((9, 0), ("sm_90a",))
    assert not wheel_serves((12, 1), ("sm_120a",))


def test_an_rtx_pro_6000_is_ok_with_cuda_13_only() -> None:
    """With a wheel of CUDA 12.4 it fails with a remedy."""
    card = Gpu(name="NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0), total=96 * GIB, free=95 * GIB)
    good, attention = gpu_findings(0, card, WHEEL_CUDA_13)
    assert (good.mark, attention.mark) == ("ok", "info")
    assert "95.0 GiB free of 96.0 GiB" in good.found
    assert "FlexAttention for packed rows (padding_free)" in attention.found
    (old,) = gpu_findings(0, Gpu(name="T4", capability=(7, 5), total=16 * GIB, free=16 * GIB), WHEEL_CUDA_13)
    assert (old.mark, "8.0 or later" in old.remedy) == ("warn", True)
    (bad,) = gpu_findings(0, card, WHEEL_CUDA_12_4)
    assert bad.mark == "fail"
    assert "CUDA 13" in bad.remedy


def test_the_driver_must_be_580_for_cuda_13() -> None:
    """570 fails. 525 is enough for CUDA 12.8."""
    marks = [driver_finding(*pair).mark for pair in (("570.86", "13.0"), ("580.65.06", "13.0"), ("525.60", "12.8"))]
    assert marks == ["fail", "ok", "ok"]


def test_a_containers_limit_counts_before_the_machines_memory() -> None:
    """The limit is 8 GiB of the machine's 24."""
    meminfo = "MemTotal:       25165824 kB\nMemFree: 1 kB\nMemAvailable:   20971520 kB\n"
    assert usable_memory(meminfo, None, None) == (24 * GIB, 20 * GIB)
    assert usable_memory(meminfo, "max\n", "0\n") == (24 * GIB, 20 * GIB)
    assert usable_memory(meminfo, str(8 * GIB), str(3 * GIB)) == (8 * GIB, 5 * GIB)
    assert usable_memory(None, None, None) == (None, None)


def test_an_unused_gpu_and_little_shared_memory_are_warnings() -> None:
    """They are a GPU that a CPU build of torch cannot use, and 64 MiB of shared memory."""
    odd = machine(shared_total=64 * 2**20, shared_free=64 * 2**20, driver="580.65.06")
    warned = {each.subject: each.remedy for each in machine_findings(odd) if each.mark == "warn"}
    assert list(warned) == ["/dev/shm", "torch's build"]
    assert "--shm-size" in warned["/dev/shm"]


def test_4_devices_want_6_processors_and_8_gib_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One device wants nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    several = on_devices(n_gpus_per_node=4)
    assert ray_findings(on_devices(), machine()) == []
    short = machine(processors=5, shared_total=8 * GIB, shared_free=7 * GIB)
    rewards = several.worker.reward.num_cpus
    assert [each.mark for each in ray_findings(several, short)] == ["ok", "warn", "warn"]
    assert all(each.remedy for each in ray_findings(several, short)[1:])
    enough = machine(processors=5 + rewards, shared_total=8 * GIB, shared_free=8 * GIB)
    assert [each.mark for each in ray_findings(several, enough)] == ["ok", "ok", "ok"]


def test_2_machines_need_an_address_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (cluster, *_) = ray_findings(on_devices(nnodes=2), machine())
    assert (cluster.mark, "trainer.ray_address" in cluster.remedy) == ("fail", True)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (cluster, *_) = ray_findings(on_devices(nnodes=2, ray_address=address), machine())
        assert (cluster.mark, "does not answer as Ray does" in cluster.found) == ("fail", True)
    monkeypatch.setenv("RAY_ADDRESS", address)
    (cluster, *_) = ray_findings(on_devices(launcher="ray"), machine())
    assert cluster.mark == "fail"
    assert cluster.found.startswith(f"nothing answers at {address}")
    (cluster, *_) = ray_findings(on_devices(nnodes=2, ray_address="auto"), machine())
    assert cluster.mark == "info"
