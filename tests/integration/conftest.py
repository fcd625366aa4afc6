"""The tiny checkpoint that integration tests run on, with weights large enough that its distributions are not flat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generator_cases import picture, request
from realistic_logits import with_realistic_logits

from cepo.microgeo.model import build_untrained_model
from cepo.models.processing import Processing
from cepo.rollout.base import GenerationRequest


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
def realistic_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with logits as large as those of trained models. Read only."""
    return with_realistic_logits(tiny_model_folder, tmp_path_factory.mktemp("realistic") / "model")


@pytest.fixture(scope="session")
def tiny_processing(tiny_model_folder: Path) -> Processing:
    return Processing(str(tiny_model_folder))


@pytest.fixture(scope="session")
def redrawn_weights(tiny_model_folder: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """Other full weights of the tiny model, by seed; those of seed 1 are the checkpoint's own."""
    return lambda seed: _redrawn(tiny_model_folder, seed=seed)


@pytest.fixture
def requests(tiny_processing: Processing) -> list[GenerationRequest]:
    """One picture, no picture, two pictures of other sizes, and a long text with one."""
    return [
        request(tiny_processing, "Find x.", [picture(1)], seed=11),
        request(tiny_processing, "What is 2 + 3?", seed=12),
        request(tiny_processing, "Which is larger?", [picture(2, (96, 64)), picture(3, (128, 96))], seed=13),
        request(tiny_processing, "Find the area of the triangle. " * 4, [picture(4)], seed=14),
    ]


@pytest.fixture
def group_of_8(tiny_processing: Processing) -> list[GenerationRequest]:
    """One prompt with a picture, longer than 4 of vLLM's blocks."""
    return [request(tiny_processing, "Find the area. " * 8, [picture(5, (256, 256))], seed=3)]
