"""A function in several processes under torch.distributed, as a launcher would start them."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 540.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `num_ranks` ranks of a process group over gloo.

    Raises what a rank raised, `BrokenProcessPool` if one died, or `TimeoutError` if they hang.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])  # once, by the server that the ranks are forked from
    with tempfile.TemporaryDirectory() as meeting, ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        # The server imports before anything has told it where from, and says nothing where that fails.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
            ranks = [pool.submit(_rank, function, arguments, rank, num_ranks, meeting) for rank in range(num_ranks)]
        return [torch.load(io.BytesIO(rank.result(timeout=seconds)), weights_only=False) for rank in ranks]


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, num_ranks: int, meeting: str) -> bytes:
    torch.set_num_threads(1)
    address = f"file://{meeting}/store"
    limit = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        packed = io.BytesIO()  # tensors in a queue would be handles on a process that is gone when they are read
        torch.save(function(*arguments), packed)
        dist.barrier()
        return packed.getvalue()
    finally:
        dist.destroy_process_group()
