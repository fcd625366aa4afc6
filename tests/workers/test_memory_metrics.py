"""Memory is reported in GiB under EasyR1's names."""

from __future__ import annotations

import psutil
import pytest
import torch

from cepo.workers import worker
from cepo.workers.worker import memory_metrics


def test_without_a_gpu_only_host_memory_is_reported() -> None:
    ((name, metric),) = memory_metrics().items()
    assert name == "perf/cpu_memory_used_gb"
    assert metric.result == pytest.approx(psutil.Process().memory_info().rss / 1024**3, rel=0.1)


def test_a_gpus_highest_marks_are_reported_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's counters, which need a GPU, are replaced by numbers: 3 GiB in tensors, 5 GiB with the allocator's cache."""
    monkeypatch.setattr(worker, "this_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 1024**3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 1024**3)
    found = memory_metrics()
    assert found["perf/max_memory_allocated_gb"].result == 3
    assert found["perf/max_memory_reserved_gb"].result == 5
