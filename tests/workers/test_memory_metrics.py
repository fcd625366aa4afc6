"""Memory is reported in GiB under EasyR1's names."""

from __future__ import annotations

import psutil
import pytest
import torch

from cepo.workers import worker
from cepo.workers.worker import memory_metrics


def test_host_memory_and_a_gpus_highest_marks_are_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's counters, which need a GPU, are replaced by numbers: 3 GiB in tensors, 5 GiB with the allocator's cache."""
    monkeypatch.setattr(worker, "this_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 1024**3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 1024**3)
    found = {name: metric.result for name, metric in memory_metrics().items()}
    used = pytest.approx(psutil.Process().memory_info().rss / 1024**3, rel=0.1)
    assert found == {
        "perf/cpu_memory_used_gb": used,
        "perf/max_memory_allocated_gb": 3,
        "perf/max_memory_reserved_gb": 5,
    }
