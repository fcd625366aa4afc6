"""Whether the run's devices are on this machine, in words; whether a cluster answers, without Ray."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from cepo.errors import ConfigError
from cepo.hardware import devices
from cepo.hardware.devices import device_in_words, require_devices
from cepo.runtime.reach import why_no_answer


class _Card:
    name, total_memory = "NVIDIA H100 80GB HBM3", 80 * 2**30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """So many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Card)
    return request.param


@pytest.mark.parametrize(
    ("cards", "words"),
    [(1, "NVIDIA H100 80GB HBM3, 80 GiB"), (2, "2 x NVIDIA H100 80GB HBM3, 80 GiB")],
    indirect=["cards"],
)
def test_gpus_are_named_with_their_memory(cards: int, words: str) -> None:
    assert device_in_words() == words


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
        (0, 3, ["trainer.n_gpus_per_node=3", "has no GPU", "there are 2 processors", "at most 2"]),
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


def served_once(server: socket.socket, answer: bytes | None) -> threading.Thread:
    """Takes one connection and answers what is said first; without an answer it keeps silent until the other side closes."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            if answer is None:
                connection.recv(1)
            else:
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("form", ["{}:{}", "ray://{}:{}"])
def test_an_address_may_be_rays_or_says_why_at_once(form: str) -> None:
    """A gRPC server may be Ray's; a closed address is none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(*server.getsockname())
        serving = served_once(server, bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        assert why_no_answer(address) is None
        serving.join()
    start = time.monotonic()
    assert "refused" in str(why_no_answer(address))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "not Ray"), (b"", "not Ray"), (None, "as Ray does: timed out")],
)
def test_a_port_of_another_program_is_told_within_10_seconds(answer: bytes | None, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        served_once(server, answer)
        start = time.monotonic()
        assert why in str(why_no_answer("{}:{}".format(*server.getsockname())))
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("address", ["auto", "local", "host-without-port"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    assert why_no_answer(address) is None
