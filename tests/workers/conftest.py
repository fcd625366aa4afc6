"""What tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from cepo.workers.distributed import data_parallel_mesh


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    data_parallel_mesh(-1)
    yield
    dist.destroy_process_group()
