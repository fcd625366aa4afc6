"""A CUDA build of torch that sees no GPU ends every command, and does not fall back to the processors without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_machine import REPOSITORY, fake_machine

from cepo.errors import ConfigError
from cepo.hardware import devices
from cepo.hardware.devices import require_wanted_device, unseen_gpu_problem

OLD_DRIVER = "driver 570.86.10, but torch's CUDA 13.0 needs at least 580"


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "command",
    [
        ("cepo.train", f"config={REPOSITORY}/configs/geo3k/cepo.yaml"),
        ("cepo.train", f"config={REPOSITORY}/configs/geo3k/cepo.yaml", "trainer.n_gpus_per_node=2"),
        ("cepo.cli", "evaluate", f"config={REPOSITORY}/configs/geo3k/cepo.yaml"),
    ],
)
def test_driver_570_ends_runs_with_code_2_and_the_doctors_words(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run("-m", *command, folder=tmp_path, **fake_machine(driver="570.86.10", HF_HUB_OFFLINE="1"))
    assert done.returncode == 2, done.stderr
    assert OLD_DRIVER in done.stderr
    assert "install driver 580 or later" in done.stderr
    assert "CUDA_VISIBLE_DEVICES= (empty)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "no work had started"


@pytest.mark.heavy
def test_a_ray_worker_without_a_gpu_says_so_first(tmp_path: Path) -> None:
    """It says so before it meets the others."""
    script = f"""
from cepo.runtime.ray.rank_process import Meeting, RankProcess
from cepo.runtime.wire import decode, encode
meeting = Meeting(rank=0, num_ranks=2, address="127.0.0.1", port=1, timeout_seconds=5.0)
failure = decode(RankProcess({str(tmp_path)!r}, {str(tmp_path / "log")!r}).build(encode(None), meeting))
print(type(failure.error).__name__, failure.message)
"""
    done = run("-c", script, folder=tmp_path, **fake_machine(driver="570.86.10"))
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert done.returncode == 0, log
    assert "ConfigError" in log.splitlines()[-1]
    assert OLD_DRIVER in log.splitlines()[-1]


@pytest.mark.heavy
def test_the_doctor_says_the_same_and_exits_with_1(tmp_path: Path) -> None:
    done = run("-m", "cepo.cli", "doctor", folder=tmp_path, **fake_machine(driver="570.86.10", COLUMNS="300"))
    assert done.returncode == 1
    assert OLD_DRIVER in done.stdout


def on_a_cuda_build(monkeypatch: pytest.MonkeyPatch, *, sees_gpu: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(devices, "driver_version", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_an_empty_list_of_visible_devices_asks_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cuda_build(monkeypatch, sees_gpu=False)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        require_wanted_device()
    for shown in ("0", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(ConfigError, match="no NVIDIA driver answers"):
            require_wanted_device()


def test_a_gpu_that_is_seen_and_a_cpu_build_of_torch_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cuda_build(monkeypatch, sees_gpu=True)
    require_wanted_device()
    on_a_cuda_build(monkeypatch, sees_gpu=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    require_wanted_device()


def test_a_driver_that_is_new_enough_is_not_blamed() -> None:
    problem = unseen_gpu_problem("580.65.06", "13.0")
    assert "driver 580.65.06 answers" in problem.found
    assert "CUDA_VISIBLE_DEVICES" in problem.remedy
