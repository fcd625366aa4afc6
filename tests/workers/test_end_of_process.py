"""A process that trained ends its process group while Python still runs, so that no thread of gloo outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cepo

PROGRAM = """
    import atexit
    import torch.distributed as dist
    from cepo.workers.distributed import data_parallel_mesh

    atexit.register(lambda: print("a group is left:", dist.is_initialized()))
    data_parallel_mesh(-1)
    {more}
    print("a group while it works:", dist.is_initialized())
"""


@pytest.mark.heavy  # starts Python with torch
@pytest.mark.parametrize("more", ["", "dist.destroy_process_group()"])
def test_no_process_group_is_left_when_python_ends(more: str) -> None:
    """Also if another program, such as vLLM, has ended it before."""
    program = textwrap.dedent(PROGRAM).format(more=more)
    environment = {**os.environ, "PYTHONPATH": str(Path(cepo.__file__).parent.parent)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    expected = ["a group while it works: " + str(more == ""), "a group is left: False"]
    assert ended.stdout.splitlines() == expected
