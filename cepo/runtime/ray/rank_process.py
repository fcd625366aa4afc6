"""Implements the Ray actor of one device: it starts torch.distributed, builds a worker and calls its methods."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from cepo.config.data_schema import DataConfig
from cepo.data.reading import ImageStore
from cepo.errors import EngineError
from cepo.hardware import require_usable_torch
from cepo.models.processing import load_processing
from cepo.runtime.wire import Receiver, decode, encode
from cepo.sizing import require_memory
from cepo.workers.distributed import process_group_backend, stay_on_loopback, this_device
from cepo.workers.worker import Worker


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """The machine and process of a rank, and a port of the machine on which nothing listens."""

    machine: str
    node_id: str
    process: int
    free_port: int


@dataclass(frozen=True)
class Meeting:
    """The address and rank numbers for starting torch.distributed."""

    rank: int
    num_ranks: int
    address: str
    port: int
    timeout_seconds: float


class RankProcess:
    """The process of one device, started by Ray. Results are encoded by `runtime.wire`.

    Args:
        folder: the driver's working directory, to which relative paths of the configuration refer.
        log_file: file for all output of the process, including that of libraries.
    """

    def __init__(self, folder: str, log_file: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._log_file = log_file
        self._worker: Worker | None = None
        self._receiver: Receiver | None = None

    def location(self) -> RankLocation:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return RankLocation(
                machine=ray.util.get_node_ip_address(),
                node_id=ray.get_runtime_context().get_node_id(),
                process=os.getpid(),
                free_port=probe.getsockname()[1],
            )

    def sees(self, file: str, seconds: float) -> bool:
        """Returns whether a file exists here, or appears within some seconds, as on a network file system."""
        until = time.monotonic() + seconds
        while not (found := os.path.isfile(file)) and time.monotonic() < until:
            time.sleep(1)
        return found

    def build(self, content: bytes, meeting: Meeting) -> bytes:
        """Joins the other ranks and builds the worker; answers with its generator's name and if it can read images."""
        with _failure_in_log():
            return encode(self._build(content, meeting))

    def call(self, method: str, message: bytes) -> bytes:
        """Calls a method of the worker with the arguments in `message`."""
        with _failure_in_log():
            return encode(self._call(method, message))

    def _build(self, content: bytes, meeting: Meeting) -> tuple[str, bool]:
        self._speak_into_log()
        require_usable_torch()  # before the ranks meet, because after that the others would wait for a failed rank
        data, settings, facts, memory, probe = decode(content)
        _meet(meeting)
        disable_progress_bar()  # a log file ends with the last messages
        processing = load_processing(settings.actor.model, data)
        require_memory(memory, settings.rollout, this_device())
        self._worker = Worker(settings, facts, processing)
        self._receiver, reads = _receiver(data, probe, processing)
        return self._worker.generator_name, reads

    def _call(self, method: str, message: bytes) -> Any:
        assert self._worker is not None and self._receiver is not None, "the worker is built before it is called"
        if method == "generate":  # a step begins
            self._receiver.forget()
        arguments, keywords = self._receiver.decode(message)
        return getattr(self._worker, method)(*arguments, **keywords)

    def _speak_into_log(self) -> None:
        file = Path(self._log_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            for standard in (sys.stdout, sys.stderr):
                standard.flush()
                os.dup2(stream.fileno(), standard.fileno())
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        logging.getLogger("cepo").setLevel(logging.INFO)


@contextmanager
def _failure_in_log() -> Iterator[None]:
    try:
        yield
    except Exception:
        logging.getLogger("cepo").exception("the call failed")
        raise


def _meet(meeting: Meeting) -> None:
    os.environ |= {"RANK": str(meeting.rank), "WORLD_SIZE": str(meeting.num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)}
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Ray shows each worker only its own GPU
    is_first, timeout = meeting.rank == 0, timedelta(seconds=meeting.timeout_seconds)
    listener = None
    try:
        if ip_address(meeting.address).is_loopback:
            stay_on_loopback()
            if is_first:  # by default torch listens on all interfaces
                listener = socket.create_server((meeting.address, meeting.port)).detach()
        store = dist.TCPStore(
            meeting.address, meeting.port, meeting.num_ranks, is_first, timeout, master_listen_fd=listener
        )
        dist.init_process_group(
            process_group_backend(this_device()),
            store=store,
            rank=meeting.rank,
            world_size=meeting.num_ranks,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"rank {meeting.rank} cannot reach rank 0 at {meeting.address}:{meeting.port} ({error}); the machines of a run "
            "must reach each other on all ports; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the network interface"
        ) from error


def _receiver(data: DataConfig, probe: Any, processing: Any) -> tuple[Receiver, bool]:
    """Returns the decoder of messages, and whether it can read the run's images, of which `probe` is one."""
    store = ImageStore(data, processing)
    try:
        reads = probe is not None and store.images(probe) is not None
    except Exception as error:  # for any reason: images are then sent
        logging.getLogger("cepo").warning(
            "%s cannot be read on this machine (%s), so images are sent to it", probe, error
        )
        reads = False
    return Receiver(store), reads
