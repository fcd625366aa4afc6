"""A function in several processes under torch.distributed, as a launcher would start them."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

MODULES_OF_A_RANK = ["rank_imports"]
"""Imported once, by the server that the ranks are forked from."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 540.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `num_ranks` ranks of a process group over gloo.

    Raises:
        AssertionError: a rank raised, died or hung.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES_OF_A_RANK)
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [
            context.Process(target=_rank, args=(function, arguments, rank, num_ranks, meeting, answers), daemon=True)
            for rank in range(num_ranks)
        ]
        # The server imports before anything has told it where from, and says nothing where that fails.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
            for rank in ranks:
                rank.start()
        try:
            return _collected(answers, ranks, seconds)
        finally:
            for rank in ranks:
                rank.join(timeout=10)
                if rank.is_alive():
                    rank.kill()


def _collected(answers: Any, ranks: list[Any], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(ranks):
        try:
            rank, error, result = answers.get(timeout=1.0)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(ranks) if rank not in results and not process.is_alive()]
            assert not dead, f"ranks {dead} died without a word"
            assert time.monotonic() < deadline, f"ranks {sorted(set(range(len(ranks))) - results.keys())} hang"
            continue
        assert error is None, f"rank {rank}: {error}"
        results[rank] = torch.load(io.BytesIO(result), weights_only=False)
    return [results[rank] for rank in range(len(ranks))]


def _rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, num_ranks: int, meeting: str, answers: Any
) -> None:
    torch.set_num_threads(1)
    try:
        address = f"file://{meeting}/store"
        limit = datetime.timedelta(seconds=240)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=limit)
        packed = io.BytesIO()  # tensors in a queue would be handles on a process that is gone when they are read
        torch.save(function(*arguments), packed)
        answers.put((rank, None, packed.getvalue()))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise
