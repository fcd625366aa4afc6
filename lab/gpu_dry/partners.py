"""Starts the processes of a check's other ranks, and lets all of them meet as the trainer's processes do.

Each rank sees one card. The group's operations on host memory are gloo's and really exchanged; those on a card, which
NCCL would do, return at once and leave their results as they are. Where there is no memory for all processes, the first
rank is `alone`: the others do not exist, and all operations return at once.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

RANK = "CEPO_DRY_RANK"
PORT = "CEPO_DRY_PORT"
SECONDS = 600
"""The time limit of the ranks' messages; below that of a check, so that a lost partner is named."""


def this_rank() -> int:
    return int(os.environ.get(RANK, "0"))


@contextmanager
def met(module: str, arguments: Sequence[str], *, num_ranks: int) -> Iterator[None]:
    """Starts `module` with the same arguments as the other ranks, and meets them; does nothing for one rank.

    Raises:
        RuntimeError: another rank failed.
    """
    if num_ranks == 1:
        yield
        return
    if this_rank() > 0:
        _meet(int(os.environ[PORT]), num_ranks)
        yield
        return
    port = _free_port()
    others: list[subprocess.Popen[bytes]] = []
    for rank in range(1, num_ranks):
        variables = os.environ | {RANK: str(rank), PORT: str(port)}
        others.append(subprocess.Popen([sys.executable, "-m", module, *arguments], env=variables))
    try:
        _meet(port, num_ranks)
        yield
        codes = [other.wait(SECONDS) for other in others]
    finally:
        for other in others:
            other.kill()
    if any(codes):
        raise RuntimeError(f"the other ranks ended with the exit codes {codes}")


@contextmanager
def alone(*, num_ranks: int) -> Iterator[None]:
    """Makes this process the first of `num_ranks` on one machine, whose other ranks do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0, world_size=num_ranks)
    new_group = dist.new_group

    def without_partners(ranks: Any = None, timeout: Any = None, backend: Any = None, **others: Any) -> Any:
        return new_group(ranks, timeout, "fake", **others)  # a group of gloo would wait for the others

    dist.new_group = without_partners
    # vLLM counts machines by messages between the ranks.
    parallel_state._node_count = lambda group: 1
    yield


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def _meet(port: int, num_ranks: int) -> None:
    """Joins the process group by the trainer's own function."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    from cepo.runtime import rank_process

    rank_process.process_group_backend = lambda device: "cpu:gloo,cuda:fake"
    rank_process._meet(rank_process.ProcessGroupAddress(this_rank(), num_ranks, "127.0.0.1", port, SECONDS))
