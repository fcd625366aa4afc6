"""Implements the Ray actor of one device: it starts torch.distributed, builds a worker and calls its methods."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.util.queue import Queue
from transformers.utils.logging import disable_progress_bar

from cepo.data.image_store import ImageStore
from cepo.errors import EngineError
from cepo.hardware import require_usable_torch, reserve_memory_in_growing_segments
from cepo.models.interface import ImageSource
from cepo.models.processing import load_processing
from cepo.runtime.dispatch import Receiver, encode
from cepo.runtime.result_queue import reporter
from cepo.workers.distributed import process_group_backend, stay_on_loopback, this_device
from cepo.workers.memory import require_memory
from cepo.workers.worker import Worker

logger = logging.getLogger(__name__)


class RankLocation(NamedTuple):
    machine: str
    process: int
    free_port: int  # of the machine: nothing listens there
    sees_probe: bool  # whether the driver's file is there


class ProcessGroupAddress(NamedTuple):
    """The address and rank numbers for starting torch.distributed."""

    rank: int
    num_ranks: int
    address: str
    port: int
    timeout_seconds: float


@contextmanager
def _failure_in_log() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the call failed")
        raise


class RankProcess:
    """The process of one device, started by Ray. All its output goes to `log_file`; results are encoded by `runtime.dispatch`.

    Relative paths of the configuration refer to `folder`, the driver's working directory.
    """

    def __init__(self, folder: str, log_file: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._log_file = log_file
        self._worker: Worker | None = None
        self._receiver: Receiver | None = None
        self._arrivals: Queue | None = None
        self._rank = 0

    def location(self, probe: str, seconds: float) -> RankLocation:
        """Returns where the process is; the driver's file `probe` may take some seconds to appear on network storage."""
        deadline = time.monotonic() + seconds
        sees_probe = os.path.isfile(probe)
        while not sees_probe and time.monotonic() < deadline:
            time.sleep(1)
            sees_probe = os.path.isfile(probe)
        with socket.socket() as unused:
            unused.bind(("", 0))
            _, free_port = unused.getsockname()
        return RankLocation(ray.util.get_node_ip_address(), os.getpid(), free_port, sees_probe)

    @_failure_in_log()
    def build(self, content: bytes, meeting: ProcessGroupAddress, arrivals: Queue | None = None) -> bytes:
        """Joins the other ranks and builds the worker; answers with its generator's name and if it can read images.

        Finished groups of responses are put into `arrivals`.
        """
        self._arrivals = arrivals
        self._rank = meeting.rank
        self._speak_into_log()
        reserve_memory_in_growing_segments()
        require_usable_torch()  # before the ranks meet, because after that the others would wait for a failed rank
        spec, row_rules, memory, probe = pickle.loads(content)
        _meet(meeting)
        disable_progress_bar()  # a log file ends with the last messages
        processing = load_processing(
            spec.actor.model, chat_template=spec.chat_template, chat_template_kwargs=spec.chat_template_kwargs
        )
        require_memory(memory, spec.generator, this_device())
        self._worker = Worker(spec.for_this_device(memory), processing)
        store = ImageStore(row_rules, processing)
        reads_images = probe is not None and _can_read(store, probe)
        self._receiver = Receiver(store)
        return encode((self._worker.generator_name, reads_images))

    @_failure_in_log()
    def call(self, method: str, message: bytes) -> bytes:
        """Calls a method of the worker with the arguments in `message`."""
        assert self._worker is not None and self._receiver is not None, "the worker is built before it is called"
        arguments, keywords = self._receiver.decode(message)
        return encode(getattr(self._worker, method)(*arguments, **keywords))

    @_failure_in_log()
    def generate(self, message: bytes, call: int, *, reports: bool) -> bytes:
        """Samples responses to the requests in `message`, and `reports` each group as it finishes; answers with None.

        Ranks that share an engine get the same requests, and only one of them reports.
        """
        assert self._worker is not None and self._receiver is not None, "the worker is built before it is called"
        assert self._arrivals is not None, "the driver gives the queue when it builds the worker"
        self._receiver.forget()  # a step begins
        requests, settings = self._receiver.decode(message)
        self._worker.generate(requests, settings, reporter(self._arrivals, call, self._rank) if reports else None)
        return encode(None)

    def _speak_into_log(self) -> None:
        file = Path(self._log_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            # The descriptors are replaced, not sys.stdout, so that compiled libraries write there too.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        logging.getLogger("cepo").setLevel(logging.INFO)


def _can_read(store: ImageStore, probe: ImageSource) -> bool:
    """Returns whether the images of a row can be read on this machine."""
    try:
        return store.images(probe) is not None
    except Exception as error:  # for any reason: images are then sent
        logger.warning("%s cannot be read on this machine (%s), so images are sent to it", probe, error)
        return False


def _meet(meeting: ProcessGroupAddress) -> None:
    os.environ["RANK"] = str(meeting.rank)
    os.environ["WORLD_SIZE"] = str(meeting.num_ranks)
    os.environ["LOCAL_RANK"] = "0"
    os.environ["MASTER_ADDR"] = meeting.address
    os.environ["MASTER_PORT"] = str(meeting.port)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Ray shows each worker only its own GPU
    is_first = meeting.rank == 0
    timeout = timedelta(seconds=meeting.timeout_seconds)
    listener = None
    try:
        if ip_address(meeting.address).is_loopback:
            stay_on_loopback()
            if is_first:  # by default torch listens on all interfaces
                listener = socket.create_server((meeting.address, meeting.port)).detach()
        store = dist.TCPStore(
            meeting.address, meeting.port, meeting.num_ranks, is_first, timeout, master_listen_fd=listener
        )
        backend = process_group_backend(this_device())
        dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.num_ranks, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"rank {meeting.rank} cannot reach rank 0 at {meeting.address}:{meeting.port} ({error}); the machines of a run "
            "must reach each other on all ports; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the network interface"
        ) from error
