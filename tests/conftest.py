"""What all tests share: checked shapes in the pure core, reproducible examples, and a tiny checkpoint."""

from __future__ import annotations

import gc
import inspect
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

import numpy
import pytest
import torch
from beartype import beartype
from hypothesis import HealthCheck, settings
from isolation import restored_process
from jaxtyping import Bool, Float, Int64, install_import_hook, jaxtyped

from cepo.algorithms import statistics
from cepo.runtime.network import prepare_own_cluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from cepo.models.processing import Processing
    from cepo.rollout.generator import GenerationRequest

# Imports make millions of objects that stay; collections between them would take a third of their time.
gc.disable()
# Runs of tests are noted as the user's own here, not in the home folder.
_STATE = tempfile.mkdtemp(prefix="cepo_tests_state_")
os.environ["XDG_STATE_HOME"] = _STATE
# Before any test module imports them: Ray reads its variables, and the hook acts, on first import only.
prepare_own_cluster()
# Policy losses import torch in annotations only, which the hook cannot read; tests/contracts/test_losses.py has their shapes.
_WITH_TORCH = ("aggregation", "divergence", "importance", "kl", "objective", "value")
install_import_hook([f"cepo.losses.{name}" for name in _WITH_TORCH], "beartype.beartype")
# Tiny models need one thread, and each core has a test worker. The number may not change later: what oneDNN compiled for
# 2 threads computes wrong values with 1 (seen with AVX2 in vLLM engines, which fixtures of a module start before a test).
if not torch.cuda.is_available():
    torch.set_num_threads(1)

# It names torch in annotations alone, which the checker has to resolve.
vars(statistics).update(Bool=Bool, Float=Float, Int64=Int64, Tensor=torch.Tensor)
for _name, _function in inspect.getmembers(statistics, inspect.isfunction):
    if _function.__module__ == statistics.__name__:
        setattr(statistics, _name, jaxtyped(_function, typechecker=beartype))

settings.register_profile(
    "reproducible",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("CEPO_FUZZ_EXAMPLES", "20")),  # 2000 in `make nightly`
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("reproducible")


@pytest.fixture(scope="session", autouse=True)
def _garbage_at_last() -> Iterator[None]:
    """Bindings that count what is left at the exit find nothing."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _state_removed() -> Iterator[None]:
    yield
    shutil.rmtree(_STATE)


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_never_garbage() -> None:
    """Each full collection looks at millions of objects of torch, transformers and vLLM otherwise, and runs end with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _modules_seed() -> None:
    """For what a module's fixtures draw."""
    _seed_everything()


@pytest.fixture(autouse=True)
def _tests_seed() -> None:
    """A test draws the same numbers whichever tests ran before it: libraries draw weights without a seed of their own."""
    _seed_everything()


def _seed_everything() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # without a GPU, torch.manual_seed notes the caller's stack for one that may come
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """No test notices which ones ran before it in this process."""
    with restored_process():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is collected again once all test modules are imported."""
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the fast set, files that are heavy as a whole are not even imported: TRL and Ray would be, by each worker."""
    if config.option.markexpr != "not heavy" or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.heavy" in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nightly tests run where -m names them. Files with heavy tests come first: no worker begins a long file at the end."""
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    heavy = {item.path for item in items if item.get_closest_marker("heavy")}
    items.sort(key=lambda item: item.path not in heavy)


def _redrawn(folder: Path, *, seed: int) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors with every matrix drawn anew from N(0, 0.1), the tied head under its own name too."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim >= 2:
            tensors[name] = 0.1 * torch.randn(tensor.shape, generator=generator)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    return tensors


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Qwen3-VL checkpoint folder of 1.2 million random weights. Read only."""
    from safetensors.torch import save_file

    from testing.toy_checkpoint import write_untrained_checkpoint

    folder = write_untrained_checkpoint(tmp_path_factory.mktemp("tiny-model"), seed=0)
    tensors = _redrawn(folder, seed=1)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def realistic_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the norm before the head scaled: largest logits of 24 on average, of which bf16 knows every 0.125."""
    from generator_cases import reference_model
    from safetensors.torch import load_file, save_file

    folder = copytree(tiny_model_folder, tmp_path_factory.mktemp("realistic") / "model")
    with torch.no_grad():
        logits = reference_model(folder)(input_ids=torch.arange(200)[None]).logits[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.norm.weight"] *= 24.0 / logits.amax(dim=1).mean()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from browser_pages import CHROMIUM
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here: apt install chromium")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def tiny_processing(tiny_model_folder: Path) -> Processing:
    from cepo.models.processing import Processing

    return Processing(str(tiny_model_folder))


@pytest.fixture(scope="session")
def redrawn_weights(tiny_model_folder: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """Other full weights of the tiny model, by seed; those of seed 1 are the checkpoint's own."""
    return lambda seed: _redrawn(tiny_model_folder, seed=seed)


@pytest.fixture
def requests(tiny_processing: Processing) -> list[GenerationRequest]:
    """One picture, no picture, two pictures of other sizes, and a long text with one."""
    from generator_cases import picture, request

    return [
        request(tiny_processing, "Find x.", [picture(1)], seed=11),
        request(tiny_processing, "What is 2 + 3?", seed=12),
        request(tiny_processing, "Which is larger?", [picture(2, (96, 64)), picture(3, (128, 96))], seed=13),
        request(tiny_processing, "Find the area of the triangle. " * 4, [picture(4)], seed=14),
    ]
