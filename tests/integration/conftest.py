"""The tiny checkpoint that integration tests run on, with weights large enough that its distributions are not flat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cepo.microgeo.model import build_untrained_model
from cepo.models.processing import Processing


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

    folder = build_untrained_model(tmp_path_factory.mktemp("tiny-model"), seed=0)
    tensors = _redrawn(folder, seed=1)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_processing(tiny_model_folder: Path) -> Processing:
    return Processing(str(tiny_model_folder))


@pytest.fixture(scope="session")
def redrawn_weights(tiny_model_folder: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """Other full weights of the tiny model, by seed; those of seed 1 are the checkpoint's own."""
    return lambda seed: _redrawn(tiny_model_folder, seed=seed)
