"""Whether the run's devices are on this machine, in words; whether a cluster answers, without Ray."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from cepo import hardware as devices
from cepo.errors import ConfigError
from cepo.hardware import device_in_words, require_devices
from cepo.runtime import reach
from cepo.runtime.reach import why_no_answer


class _Card:
    name, total_memory = "NVIDIA H100 80GB HBM3", 80 * 2**30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """So many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Card)
    monkeypatch.setenv("PATH", "")  # no driver answers
    return request.param


@pytest.mark.parametrize(
    ("cards", "words"),
    [(1, "NVIDIA H100 80GB HBM3, 80 GiB"), (2, "2 x NVIDIA H100 80GB HBM3, 80 GiB")],
    indirect=["cards"],
)
def test_gpus_are_named_with_their_memory(cards: int, words: str) -> None:
    assert device_in_words() == words


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
    asked = list[int]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or _Card)
    if cards == 1:
        assert device_in_words() == "NVIDIA H100 80GB HBM3, 80 GiB"
        return
    assert device_in_words() == "2 x NVIDIA B200, 179 GiB"
    assert asked == []
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
    ],
    indirect=["cards"],
)
def test_more_devices_than_there_are_are_refused(
    cards: int, asked: int, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_processors", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        require_devices(asked)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(("cards", "asked"), [(0, 1), (0, 2), (4, 4), (4, 2)], indirect=["cards"])
def test_as_many_devices_as_there_are_are_accepted(cards: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_processors", lambda: 2)
    require_devices(asked)


def test_a_closed_address_is_told_at_once() -> None:
    """An open one may be that of Ray's client; for others `ray status` decides, see tests/runtime/test_own_cluster.py."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        assert why_no_answer(f"ray://{address}") is None
    assert "refused" in str(why_no_answer(f"ray://{address}"))
    assert "refused" in str(why_no_answer(address))


def test_a_port_of_another_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for 44 s, and ray.init then ends the process."""
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        why = why_no_answer("{}:{}".format(*server.getsockname()))
    assert why == "`ray status` had no answer from it within 0.1 s"


@pytest.mark.parametrize("address", ["auto", "local", "host-without-port"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    assert why_no_answer(address) is None
