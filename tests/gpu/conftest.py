"""Each test here runs at two places: on a CPU with tiny shapes, so that what runs on a GPU is known to run, and on a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_places import CPU, CUDA, Place
from isolation import own_caches

AT_NIGHT = pytest.mark.nightly("what a CPU can show has tests of its own; this one shows that the GPU's test runs")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(CPU, id="cpu", marks=[pytest.mark.heavy, AT_NIGHT]),
        pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
    ],
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    requested: Place = request.param
    on_gpu = requested.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        built = "a CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
        pytest.skip(f"no CUDA device is visible to torch ({built})")
    if not on_gpu and torch.cuda.is_available():
        pytest.skip("the trainer takes the GPU of this machine, where the same test runs with larger shapes")
    return replace(requested, folder=tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def _device_as_it_was() -> Iterator[None]:
    """No test leaves weights on the device to the next."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def _no_trace_in_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_caches(tmp_path_factory.mktemp("caches")):
        yield


@pytest.fixture
def figure(record_property: Any) -> Any:
    """Records what was measured under a name in the test's report, and returns it: `figure("peak GiB", 3.2)`."""

    def record(name: str, value: Any) -> Any:
        record_property(name, value)
        sys.stdout.write(f"{name}: {value}\n")
        return value

    return record
