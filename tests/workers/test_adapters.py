"""Names of adapter targets are looked up before PEFT trains without some, and fused layers compute what PEFT's compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cepo.errors import ConfigError
from cepo.workers.adapters import FusedLoraLinear, fuse_adapters, require_targets, target_names


class _Model(nn.Module):
    """Layers of a language model beside a vision tower, with a head that is tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleDict({"qkv": nn.Linear(2, 2), "q_proj": nn.Linear(2, 2)})
        self.embed_tokens = nn.Embedding(5, 2)
        self.lm_head = nn.Linear(2, 5, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head


def test_names_are_separated_by_commas_and_all_linear_is_none() -> None:
    assert target_names("q_proj, v_proj") == ["q_proj", "v_proj"]
    assert target_names("q_proj") == ["q_proj"]
    assert target_names("all-linear") == []


@pytest.mark.parametrize("names", [["q_proj"], ["layers.0.q_proj"], ["q_proj", "norm"], []])
def test_names_and_ends_of_paths_fit(names: list[str]) -> None:
    require_targets(_Model(), names, excluded=".*visual.*")


@pytest.mark.parametrize(
    ("name", "excluded", "words"),
    [
        ("q_prj", None, r"'q_prj' fits no layer.*Did you mean 'q_proj'\?.* linear layers: q_proj, qkv"),
        (
            "qkv",
            ".*visual.*",
            r"'qkv' fits no layer of this model outside of exclude_modules '\.\*vis.*layers: q_proj;",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_refused_with_the_layers(name: str, excluded: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_targets(_Model(), ["q_proj", name], excluded=excluded)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_on_head_or_embeddings_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' fits {name}, and .* no adapter.* linear layers: q_proj, qkv;"):
        require_targets(_Model(), ["q_proj", name], excluded=None)
    require_targets(_Model(), ["q_proj"], excluded=None)


def test_an_excluded_head_is_not_adapted_and_not_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lm_head' fits no layer .* outside of exclude_modules 'lm_head'"):
        require_targets(_Model(), ["lm_head"], excluded="lm_head")


SIZES = (24, 40)


def build(dtype: torch.dtype = torch.float32, *, fused: bool, bias: bool = False, **settings: Any) -> Any:
    """One layer under an adapter of rank 4 whose B is not zero."""
    from peft import LoraConfig, get_peft_model  # seconds, which a worker without these tests need not wait

    torch.manual_seed(5)
    model = nn.ModuleDict({"layer": nn.Linear(*SIZES, bias=bias, dtype=dtype)})
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["layer"], **settings)
    wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(6)))
    if fused:
        fuse_adapters(wrapped)
        assert isinstance(wrapped.base_model.model["layer"], FusedLoraLinear)
    return wrapped.base_model.model["layer"]


def results(layer: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output for a batch of sequences, and the gradients of its input and of both adapter weights."""
    generator = torch.Generator().manual_seed(7)
    num_inputs, num_outputs = SIZES
    x = torch.randn(2, 3, num_inputs, generator=generator).to(dtype).requires_grad_()
    factors = torch.randn(2, 3, num_outputs, generator=generator).to(dtype)
    output = layer(x)
    trained = [weight for weight in layer.parameters() if weight.requires_grad]
    assert len(trained) == 2
    gradients = torch.autograd.grad((output * factors).sum(), [x, *trained])
    return [output, *gradients]


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_those_of_pefts_layer(bias: bool) -> None:
    of_fused = results(build(fused=True, bias=bias))
    of_peft = results(build(fused=False, bias=bias))
    for fused_result, expected in zip(of_fused, of_peft, strict=True):
        assert fused_result.shape == expected.shape
        difference = (fused_result - expected).detach()
        assert float(difference.norm() / expected.detach().norm()) < 1e-6


def test_in_bfloat16_the_result_is_nearer_to_float64_than_pefts() -> None:
    exact = results(build(torch.float64, fused=False), torch.float64)[0].detach()

    def error(*, fused: bool) -> float:
        output = results(build(torch.bfloat16, fused=fused), torch.bfloat16)[0]
        return float((output.double() - exact).detach().norm())

    assert error(fused=True) < error(fused=False)


def test_a_disabled_adapter_is_left_to_peft() -> None:
    layer = build(fused=True)
    plain = build(fused=False)
    assert type(layer) is FusedLoraLinear
    x = torch.randn(5, SIZES[0])
    with_adapter = plain(x).detach()
    for lora_layer in (layer, plain):
        lora_layer.enable_adapters(False)
    assert torch.equal(layer(x), plain(x))
    assert float((layer(x) - with_adapter).norm()) > 0.1
