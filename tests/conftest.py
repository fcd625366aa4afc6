"""What all tests share: shapes in the pure core's signatures are checked, examples are reproducible."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

import cepo  # noqa: F401  (first: where it was not installed by pip, it lets torchvision be imported beside a CPU torch)

# Before any test module imports them: the hook acts on first import only.
install_import_hook(["cepo.algorithms.credit", "cepo.losses"], "beartype.beartype")

settings.register_profile(
    "reproducible",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("reproducible")

_SINGLE_THREADED = {"unit", "numerics", "contracts"}


@pytest.fixture(scope="session", autouse=True)
def _garbage_at_last() -> Iterator[None]:
    """Bindings that count what is left at the exit find nothing."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_never_garbage() -> None:
    """Each full collection looks at millions of objects of torch, transformers and vLLM otherwise, and runs end with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _same_numbers_whatever_ran_before() -> None:
    """Libraries draw weights without a seed of their own, and which modules share a process differs from run to run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread_for_small_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    folder = Path(str(request.node.path)).relative_to(Path(__file__).parent).parts[0]
    if folder not in _SINGLE_THREADED:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
