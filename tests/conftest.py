"""What all tests share: shapes in the pure core's signatures are checked, examples are reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

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
