"""The devices of this machine in words, and one that torch cannot use; threads; whether a cluster answers, without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from fake_machine import REPOSITORY, fake_machine

from cepo import hardware as devices
from cepo.config import load_config
from cepo.errors import ConfigError
from cepo.hardware import device_in_words, require_devices, require_usable_torch
from cepo.runtime import network
from cepo.runtime.network import why_no_answer
from cepo.runtime.preflight import limited_threads, unread_variables


class _Card:
    name = "NVIDIA H100 80GB HBM3"
    total_memory = 80 * 2**30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """So many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Card)
    monkeypatch.setenv("PATH", "")  # no driver answers
    return request.param


@pytest.mark.parametrize(
    ("shown", "told", "cards"), [(None, "", 2), ("1,0", "-i 1,0", 2), ("MIG-5", "", 1)], indirect=["cards"]
)
def test_the_driver_names_gpus_without_a_context_on_one(
    cards: int, shown: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of torch's takes 0.5 GB of the first GPU; only a part of a GPU, which nvidia-smi does not name, needs one."""
    program = tmp_path / "nvidia-smi"
    rows = "NVIDIA B200, 183359\\nNVIDIA B200, 183359\\n"
    program.write_text(f"#!/bin/sh\necho \"$@\" >{tmp_path}/asked\nprintf '{rows}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    asked_indices = list[int]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked_indices.append(index) or _Card)
    if cards == 1:
        assert device_in_words() == "NVIDIA H100 80GB HBM3, 80 GiB"
        return
    assert device_in_words() == "2 x NVIDIA B200, 179 GiB"
    assert asked_indices == []
    assert told in (tmp_path / "asked").read_text(encoding="utf-8")


@pytest.mark.parametrize("cards", [0], indirect=True)
def test_processors_are_named_with_the_reason_why_no_gpu_is(
    cards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some Processor 3000\n" * 2)
    monkeypatch.setattr(devices, "_CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(devices, "num_processors", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_in_words().startswith("CPU (Some Processor 3000, 2 processors): torch ")
    assert device_in_words().endswith(" is a build without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_in_words().endswith("CUDA_VISIBLE_DEVICES= hides the GPUs")


@pytest.mark.parametrize(
    ("cards", "asked", "parts"),
    [
        (1, 8, ["trainer.n_gpus_per_node=8", "has 1: NVIDIA H100", "at most 1"]),
        (0, 3, ["trainer.n_gpus_per_node=3", "has no GPU", "2 processors", "at most 2"]),
        (0, 1, None), (0, 2, None), (4, 4, None), (4, 2, None),
    ],
    indirect=["cards"],
)  # fmt: skip
def test_more_devices_than_there_are_are_refused(
    cards: int, asked: int, parts: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_processors", lambda: 2)
    if parts is None:
        require_devices(asked)
        return
    with pytest.raises(ConfigError) as caught:
        require_devices(asked)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_closed_address_is_told_at_once() -> None:
    """An open one may be that of Ray's client; for others `ray status` decides, see tests/runtime/test_own_cluster.py."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        assert why_no_answer(f"ray://{address}") is None
    assert "refused" in str(why_no_answer(f"ray://{address}"))
    assert "refused" in str(why_no_answer(address))
    assert [why_no_answer(form) for form in ("auto", "local", "host-without-port")] == [None] * 3, "left to Ray"


def test_a_port_of_another_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for 44 s, and ray.init then ends the process."""
    monkeypatch.setattr(network, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        why = why_no_answer("{}:{}".format(*server.getsockname()))
    assert why == "`ray status` had no answer from it within 0.1 s"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """8 processors, torch not yet loaded, and no limit set; its files can be rewritten."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(devices, "_CPU_QUOTA", tmp_path / "cpu.max")
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "recorded", "expected"),
    [
        ("max 100000", None, None),
        ("300000 100000", None, "threads: 3, as this process may use 3 of 8 processors"),
        ("50000 100000", None, "threads: 1, as this process may use 1 of 8 processors"),
        ("max 100000", 4, "threads: 4, as many as when the run began"),
        ("max 100000", 8, None),
    ],
)
def test_threads_are_as_many_as_processors_may_be_used(
    machine: Path, quota: str, recorded: int | None, expected: str | None
) -> None:
    (machine / "cpu.max").write_text(f"{quota}\n")
    if recorded is not None:
        (machine / "environment.json").write_text(json.dumps([{"threads": {"torch": recorded}}]))
    run = ["config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={machine}"]
    said = limited_threads(load_config(run).trainer)
    assert (said or "").startswith(expected or "")
    assert (said is None) == (expected is None)
    assert os.environ.get("OMP_NUM_THREADS") == (None if expected is None else expected.split()[1].rstrip(","))


def test_a_resumed_run_keeps_its_threads(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under Ray shares the processors among its workers; another run folder has no number; a user's limit stays."""
    run = ["config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={machine}"]
    (machine / "environment.json").write_text(json.dumps([{"threads": {"torch": 3}}]))
    assert limited_threads(load_config([*run, "trainer.launcher=ray"]).trainer) is None
    assert limited_threads(load_config([*run, "trainer.find_last_checkpoint=false"]).trainer) is None
    assert (limited_threads(load_config(run).trainer) or "").startswith("threads: 3, as many as when the run began")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert limited_threads(load_config(run).trainer) is None
    assert os.environ["OMP_NUM_THREADS"] == "7"


OLD_DRIVER = "CUDA 13.0 and sees no GPU (driver 570.86.10 answers; needed: 580 or later)"


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.heavy
def test_driver_570_ends_runs_with_code_2_and_the_doctors_words(tmp_path: Path) -> None:
    command = ("-m", "cepo.train", f"config={REPOSITORY}/configs/geo3k/cepo.yaml")
    done = run(*command, folder=tmp_path, **fake_machine(driver="570.86.10", HF_HUB_OFFLINE="1"))
    assert done.returncode == 2, done.stderr
    assert OLD_DRIVER in done.stderr
    assert "CUDA_VISIBLE_DEVICES= (empty)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "no work had started"


@pytest.mark.heavy
def test_a_ray_worker_without_a_gpu_says_so_first(tmp_path: Path) -> None:
    script = f"""
from cepo.runtime.rank_process import ProcessGroupAddress, RankProcess
from cepo.runtime.dispatch import encode
meeting = ProcessGroupAddress(rank=0, num_ranks=2, address="127.0.0.1", port=1, timeout_seconds=5.0)
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
    assert fault.mark == "fail"
    assert "check nvidia-smi" in fault.remedy
    assert "sees no GPU (driver 525.60 answers; needed: 525 or later)" in fault.found


def test_forked_randomness_is_that_of_this_processs_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list torch neither saves the streams of the other seven GPUs nor warns about their number."""
    assert devices.drawing_devices() == ([] if not torch.cuda.is_available() else [torch.cuda.current_device()])
    saved: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: saved.append(device) or torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.random.fork_rng(devices=devices.drawing_devices()):
            pass
    assert saved == [3]


@pytest.mark.parametrize(
    ("environment", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_segments_grow_unless_the_user_configures_torch(environment: dict[str, str], after: dict[str, str]) -> None:
    devices.reserve_memory_in_growing_segments(environment)
    assert environment == after


def test_variables_of_other_programs_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift reads MAX_PIXELS and NPROC_PER_NODE; the latter names the setting's own value and needs no note."""
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    config = load_config(["config=microgeo/base"])
    assert unread_variables(config) == [
        "note: MAX_PIXELS=1003520 is not read here; the setting data.max_pixels is null"
    ]
