"""A CUDA build of torch that cannot use the GPU that is there ends every command; without a GPU it runs on processors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_machine import REPOSITORY, fake_machine

from cepo import hardware as devices
from cepo.errors import ConfigError
from cepo.hardware import device_in_words, require_usable_torch

OLD_DRIVER = "CUDA 13.0 and sees no GPU (driver 570.86.10 answers; needed: 580 or later)"


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.heavy
def test_driver_570_ends_runs_with_code_2_and_the_doctors_words(tmp_path: Path) -> None:
    asked = ("-m", "cepo.train", f"config={REPOSITORY}/configs/geo3k/cepo.yaml")
    done = run(*asked, folder=tmp_path, **fake_machine(driver="570.86.10", HF_HUB_OFFLINE="1"))
    assert done.returncode == 2, done.stderr
    assert OLD_DRIVER in done.stderr
    assert "CUDA_VISIBLE_DEVICES= (empty)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "no work had started"


@pytest.mark.heavy
def test_a_ray_worker_without_a_gpu_says_so_first(tmp_path: Path) -> None:
    script = f"""
from cepo.runtime.rank_process import Meeting, RankProcess
from cepo.runtime.dispatch import encode
meeting = Meeting(rank=0, num_ranks=2, address="127.0.0.1", port=1, timeout_seconds=5.0)
RankProcess({str(tmp_path)!r}, {str(tmp_path / "log")!r}).build(encode(None), meeting)
"""
    done = run("-c", script, folder=tmp_path, **fake_machine(driver="570.86.10"))
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert done.returncode == 1, log
    assert "ConfigError" in log.splitlines()[-1]
    assert OLD_DRIVER in log.splitlines()[-1]


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU, and a CUDA build: folders `dev` and `pci` in the places of /dev and the PCI bus, no driver."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, place in (("_DEVICES", tmp_path / "dev"), ("_PCI_DEVICES", tmp_path / "pci")):
        place.mkdir()
        monkeypatch.setattr(devices, name, place)
    monkeypatch.setattr(devices, "driver_version", lambda: None)
    return tmp_path


def add_pci_device(hardware: Path, vendor: str, kind: str) -> None:
    folder = hardware / "pci" / f"0000:0{len(list((hardware / 'pci').iterdir()))}:00.0"
    folder.mkdir()
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


GPU = ("0x10de", "0x030200")


@pytest.mark.parametrize(
    ("device", "shown", "refused"),
    [
        (GPU, None, True),
        (("0x10de", "0x030000"), None, True),
        (("0x8086", "0x030000"), None, False),  # another maker's card
        (("0x10de", "0x040300"), None, False),  # NVIDIA's sound device
        (GPU, "", False),
        (GPU, "-1", False),
        (GPU, "0,1", True),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_unless_hidden(
    device: tuple[str, str], shown: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch, hardware: Path
) -> None:
    add_pci_device(hardware, *device)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if not refused:
        require_usable_torch()
        return
    with pytest.raises(ConfigError, match="no NVIDIA driver answers"):
        require_usable_torch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        require_usable_torch()
    monkeypatch.setattr(torch.version, "cuda", None)
    require_usable_torch()


@pytest.mark.usefixtures("hardware")
def test_a_laptop_is_told_why_it_trains_on_processors() -> None:
    said = f"this machine has no NVIDIA GPU, so torch {torch.__version__}, a CUDA build, runs on the processors"
    assert device_in_words().endswith(said)


@pytest.mark.usefixtures("hardware")
def test_a_torchvision_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"nms does not exist\. Remedy: install both in one command"):
        require_usable_torch()


def test_the_driver_is_named_beside_the_one_that_torch_needs(monkeypatch: pytest.MonkeyPatch, hardware: Path) -> None:
    add_pci_device(hardware, *GPU)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(devices, "driver_version", lambda: "525.60")
    fault = devices.torch_build()
    assert (fault.mark, "check nvidia-smi" in fault.remedy) == ("fail", True)
    assert "sees no GPU (driver 525.60 answers; needed: 525 or later)" in fault.found
