"""The patch embedding as one product is the convolution of transformers' vision towers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_checkpoint
from torch import Tensor, nn

from cepo.models.families import FAMILIES, GridFamily
from cepo.models.patch_embedding import PatchConvolution, use_linear_patch_embedding
from cepo.models.pretrained import load_model

GRID_TYPES = [model_type for family in FAMILIES if isinstance(family, GridFamily) for model_type in family.model_types]
ROUNDING = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 4e-3}
"""The largest difference of two orders of summation, relative to the largest value; a bf16 number has 8 bits."""


def published_embedding(model_type: str) -> nn.Module:
    return copy.deepcopy(drawn_embedding(model_type))


@cache
def drawn_embedding(model_type: str) -> nn.Module:
    """The patch embedding of transformers' tower at the sizes of the configuration's defaults, in float32."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type))
    embedding = model.model.visual.patch_embed.to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(1)
    for weight in embedding.parameters():
        nn.init.normal_(weight, std=0.02, generator=generator)
    return embedding


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("model_type", GRID_TYPES)
def test_the_product_is_each_familys_convolution(model_type: str, dtype: torch.dtype) -> None:
    """Values and the gradients of weight and bias; the names and shapes of the parameters stay."""
    published: Any = published_embedding(model_type).to(dtype)
    generator = torch.Generator().manual_seed(2)
    patch_size = published.proj.weight[0].numel()
    patches = torch.randn(40, patch_size, generator=generator).to(dtype)
    by_convolution = outcome(published, patches)
    shapes = {name: weight.shape for name, weight in published.named_parameters()}

    use_linear_patch_embedding([published])
    assert {name: weight.shape for name, weight in published.named_parameters()} == shapes
    embedding = published.proj
    assert isinstance(embedding, PatchConvolution)
    embedding.forward = embedding.product  # in float32 on a CPU it stays a convolution
    by_product = outcome(published, patches)
    for value, expected in zip(by_product, by_convolution, strict=True):
        assert value.shape == expected.shape
        largest_gap = float((value - expected).abs().max())
        assert largest_gap <= ROUNDING[dtype] * float(expected.abs().max())


def outcome(embedding: nn.Module, patches: Tensor) -> list[Tensor]:
    """The embeddings, and the gradient of each parameter for a fixed random gradient of theirs."""
    embeddings = embedding(patches)
    gradient = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(3)).to(patches.dtype)
    gradients = torch.autograd.grad(embeddings, list(embedding.parameters()), gradient)
    return [embeddings.detach(), *gradients]


def test_in_float32_on_a_cpu_the_bits_are_the_convolutions() -> None:
    published: Any = published_embedding("qwen3_vl")
    patches = torch.randn(7, published.proj.weight[0].numel())
    expected = published(patches)
    use_linear_patch_embedding([published])
    assert torch.equal(published(patches), expected)


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_loaded_tower_has_the_product_and_published_names(with_weights: bool, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = write_checkpoint("qwen2_5_vl", tmp_path)
    options: Any = {"trust_remote_code": False, "override_config": {}, "with_weights": with_weights}
    model = load_model(str(folder), dtype=torch.bfloat16, **options)
    modules = [module for module in model.modules() if isinstance(module, nn.Conv3d)]
    assert [type(module) for module in modules] == [PatchConvolution]
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert stored.get_tensor("visual.patch_embed.proj.weight").shape == (64, 3, 2, 14, 14)
    weight = model.get_parameter("model.visual.patch_embed.proj.weight")
    assert weight.shape == (64, 3, 2, 14, 14)
    assert weight.is_meta != with_weights


def test_a_convolution_that_embeds_no_patches_stays() -> None:
    """One whose kernels overlap, one with padding, and one of two dimensions."""
    convolutions = nn.Sequential(
        nn.Conv3d(3, 4, 2, stride=1), nn.Conv3d(3, 4, 2, stride=2, padding=1), nn.Conv2d(3, 4, 2, stride=2)
    )
    use_linear_patch_embedding([convolutions])
    assert [type(module) for module in convolutions] == [nn.Conv3d, nn.Conv3d, nn.Conv2d]


def test_patches_of_another_size_are_refused() -> None:
    embedding = PatchConvolution(3, 4, (2, 2, 2), stride=(2, 2, 2)).bfloat16()
    with pytest.raises(ValueError, match=r"of shape \(3, 2, 4, 4\).* of shape \(3, 2, 2, 2\)"):
        embedding(torch.zeros(5, 3, 2, 4, 4, dtype=torch.bfloat16))
