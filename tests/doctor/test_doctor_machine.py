"""The doctor's view of memory and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_cases import GIB, machine

from cepo.doctor import machine as doctor_machine
from cepo.doctor.machine import Gpu, gpu_finding, machine_findings, usable_memory, wheel_serves
from cepo.doctor.run_checks import memory_finding
from cepo.sizing import Memory

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
    good = gpu_finding(0, card, WHEEL_CUDA_13)
    assert (good.mark, "95.0 GiB free of 96.0 GiB" in good.found) == ("ok", True)
    old = gpu_finding(0, Gpu(name="T4", capability=(7, 5), total=16 * GIB, free=16 * GIB), WHEEL_CUDA_13)
    assert (old.mark, "8.0 or later" in old.remedy) == ("warn", True)
    bad = gpu_finding(0, card, WHEEL_CUDA_12_4)
    assert (bad.mark, "CUDA 13" in bad.remedy) == ("fail", True)


def test_a_containers_limit_counts_before_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 1 MiB, of which 256 KiB are used; without one the machine's memory counts."""
    monkeypatch.setattr(doctor_machine, "_CONTAINER", tmp_path)
    whole = usable_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory()[0] == whole[0] > 2**20
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**18}\n")
    assert usable_memory() == (2**20, 3 * 2**18)


def test_an_unused_gpu_and_little_shared_memory_are_warnings() -> None:
    """They are a GPU that a CPU build of torch cannot use, and 64 MiB of shared memory."""
    odd = machine(shared_free=64 * 2**20, driver="580.65.06")
    warned = {each.subject: each.remedy for each in machine_findings(odd) if each.mark == "warn"}
    assert list(warned) == ["/dev/shm", "torch's build"]
    assert "--shm-size" in warned["/dev/shm"]


def test_4_gpus_want_8_gib_of_shared_memory() -> None:
    cards = tuple(Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB) for _ in range(4))
    for free, mark in ((7, "warn"), (8, "ok")):
        findings = machine_findings(
            machine(gpus=cards, compiled=WHEEL_CUDA_13, torch_cuda="13.0", shared_free=free * GIB)
        )
        assert [each.mark for each in findings if each.subject == "/dev/shm"] == [mark]


@pytest.mark.parametrize(
    ("free", "workers", "mark"), [(13, 1, "fail"), (14, 1, "warn"), (55, 4, "fail"), (72, 4, "ok")]
)
def test_without_a_gpu_workers_share_the_memory(free: int, workers: int, mark: str) -> None:
    """One worker needs 14 GiB, and at most 18."""
    needs = Memory(
        weights=5 * GIB, optimizer=3 * GIB, away=0, engine=2 * GIB, least_pass=4 * GIB, largest_pass=8 * GIB,
        checkpoint=0, parameters=0,
    )  # fmt: skip
    assert memory_finding(needs, workers, free * GIB).mark == mark
