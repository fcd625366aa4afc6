"""Training steps with ever new pictures leave nothing behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cepo.models.processing import Processing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULT = BENCHMARKS / "results" / "memory_over_steps.json"


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_over_steps", BENCHMARKS / "memory_over_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.heavy
def test_twelve_steps_hold_no_more_tensors_than_four(
    benchmark_script: ModuleType, tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    """Each step has new images."""
    actor = benchmark_script.build_actor(tiny_model_folder, tiny_processing, 4)
    held = []
    for step in range(12):
        benchmark_script.train_step(actor, benchmark_script.new_rows(tiny_processing, step, 0), step)
        if step % 4 == 3:
            held.append(benchmark_script.tensor_bytes())
    assert held[0] == held[1] == held[2] > 1e6


@pytest.mark.parametrize("trained", ["adapter", "all weights"])
def test_two_ranks_were_measured_to_stay_flat_over_50_steps(trained: str) -> None:
    result: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    assert len(result[trained]) == result["ranks"] == 2
    for figures in result[trained]:
        assert [each["step"] for each in figures] == [10, 20, 30, 40, 50]
        assert len({each["tensor_bytes"] for each in figures}) == 1
        resident = [each["resident_bytes"] for each in figures]
        assert max(resident) < 1.02 * resident[0]
