"""The memory that a step reports: that of scoring and update, without the engine's."""

from __future__ import annotations

import pytest
import torch

from cepo.workers import worker
from cepo.workers.worker import AllocatorBytes, Worker, memory_metrics

GIB = 2**30


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of 47 GiB that sleeps, beside a trainer whose peak is 8 GiB."""
    monkeypatch.setattr(worker, "this_device", lambda: torch.device("cuda", 0))
    for name, gibibytes in {
        "memory_allocated": 50,
        "memory_reserved": 52,
        "max_memory_allocated": 55,
        "max_memory_reserved": 57,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda gibibytes=gibibytes: gibibytes * GIB)


@pytest.mark.usefixtures("_gpu")
def test_a_sleeping_engine_is_not_counted_as_the_trainers() -> None:
    """torch counts the 47 GiB of a sleeping engine; before it started, the trainer had 3 GiB of 4."""
    engine = AllocatorBytes.now() - AllocatorBytes(allocated=3 * GIB, reserved=4 * GIB)
    assert engine == (47 * GIB, 48 * GIB)
    metrics = memory_metrics(engine)
    assert metrics["perf/max_memory_allocated_gb"].value == 8
    assert metrics["perf/max_memory_reserved_gb"].value == 9


def test_without_a_gpu_only_the_process_is_reported() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert AllocatorBytes.now() == (0, 0)
    assert set(memory_metrics(AllocatorBytes(0, 0))) == {"perf/cpu_memory_used_gb"}


@pytest.mark.usefixtures("_gpu")
def test_the_peak_begins_when_sampling_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own peak, in sampling, is not the trainer's; scoring and update share one peak."""
    events: list[str] = []

    class Recorder:
        def rest(self) -> None:
            events.append("rest")

        def generate(self, *_: object) -> list[object]:
            events.append("generate")
            return []

        def score(self, rows: object, **_: object) -> list[object]:
            events.append("score")
            return []

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    subject = object.__new__(Worker)
    subject.generator = subject.actor = Recorder()  # type: ignore[assignment]
    subject._models = {}
    subject._has_sampled = True
    subject.score([])
    subject.score([])
    subject.generate([object()], None)  # type: ignore[list-item, arg-type]
    subject.score([])
    assert events == [
        *("rest", "reset", "score"),
        *("rest", "score"),
        *("generate", "rest", "reset", "score"),
    ]
