"""Products by oneDNN against PyTorch's own, whatever the processor that the tests run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from cepo import hardware
from cepo.models.cpu import matrix_products
from cepo.models.head import target_log_probs
from cepo.models.head_entropy import log_probs_and_entropies

LARGE = (320, 384)  # out, in: more than 100,000 weights
ROUNDING = 1e-5


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: True)


def close(result: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert result is not None
    assert expected is not None
    assert result.shape == expected.shape
    return bool((result - expected).abs().max() <= ROUNDING * expected.abs().max())


@pytest.mark.parametrize("shape", [(7, 384), (2, 3, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_and_its_gradients_are_the_same(by_onednn: None, shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(384, 320, bias=has_bias)
    twin = nn.Linear(384, 320, bias=has_bias)
    twin.load_state_dict(layer.state_dict())
    matrix_products.use_fast_products(layer)
    hidden = torch.randn(shape, requires_grad=True)
    twin_hidden = hidden.detach().clone().requires_grad_()
    output = layer(hidden)
    assert type(layer) is nn.Linear
    assert "_Linear" in str(output.grad_fn), "PyTorch's own product was used"
    expected = twin(twin_hidden)
    direction = torch.randn_like(expected)
    output.backward(direction)
    expected.backward(direction)
    assert close(output, expected)
    assert close(hidden.grad, twin_hidden.grad)
    assert close(layer.weight.grad, twin.weight.grad)
    if has_bias:
        assert close(layer.bias.grad, twin.bias.grad)


def test_a_frozen_layer_keeps_no_input_for_its_gradient(by_onednn: None) -> None:
    weight = torch.randn(LARGE)
    hidden = torch.randn(5, 384, requires_grad=True)
    output = matrix_products.linear(hidden, weight)
    saved = output.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [tensor is None for tensor in saved] == [True, False]
    output.sum().backward()
    assert close(hidden.grad, weight.sum(dim=0).expand(5, -1))


def test_products_without_gradient_are_the_same(by_onednn: None) -> None:
    torch.manual_seed(1)
    weight = torch.randn(LARGE)
    hidden = torch.randn(6, 320)
    residual = torch.randn(6, 384)
    assert close(matrix_products.multiply(hidden, weight), hidden @ weight)
    assert close(matrix_products.add_product(residual, hidden, weight), residual + hidden @ weight)
    assert close(matrix_products.add_product(residual[0], hidden, weight), residual[0] + hidden @ weight)
    assert close(matrix_products.weight_gradient(hidden, residual), hidden.t() @ residual)
    transposed = weight.t().contiguous().t()  # the same numbers in another order of memory
    assert close(matrix_products.multiply(hidden, transposed), hidden @ weight)


class Shapes(TorchDispatchMode):
    """Records the shapes of the operands that oneDNN multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.Size, torch.Size]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.seen.add((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


def test_passes_of_many_lengths_share_few_compiled_products(by_onednn: None) -> None:
    """oneDNN keeps about 0.6 MB of code for each shape: a run of the real model grew by a gigabyte in 24 steps."""
    torch.manual_seed(3)
    layer = nn.Linear(384, 320)
    matrix_products.use_fast_products(layer)
    with Shapes() as shapes:
        for num_tokens in range(1, 65):
            hidden = torch.randn(num_tokens, 384, requires_grad=True)
            output = layer(hidden)
            assert output.shape == (num_tokens, 320)
            assert close(output, functional.linear(hidden, layer.weight, layer.bias))
            output.add_(1.0).sum().backward()  # adapters add to it in place
            assert close(hidden.grad, layer.weight.sum(dim=0).expand(num_tokens, -1))
    products = {"output", "gradient of the input", "gradient of the weight"}
    assert len(shapes.seen) == 4 * len(products)
    assert layer(torch.randn(0, 384)).shape == (0, 320)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_heads_log_probs_and_gradients_are_the_same(
    by_onednn: None, monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    """In several chunks of tokens; a frozen head prepares the gradient ahead, a trained one recomputes its logits."""
    torch.manual_seed(2)
    head = nn.Linear(384, 320, bias=False).requires_grad_(is_trained)
    targets = torch.randint(320, (41,))
    factors = torch.randn(41)
    results: list[torch.Tensor | None] = []
    start = torch.randn(41, 384)
    for prefers in (True, False):
        monkeypatch.setattr(matrix_products, "prefers_onednn", lambda prefers=prefers: prefers)
        hidden = start.clone().requires_grad_()
        log_probs = target_log_probs(hidden, head, targets, temperature=0.7, chunk_tokens=20)
        (log_probs * factors).sum().backward()
        results += [log_probs.detach(), hidden.grad]
        if is_trained:
            results.append(head.weight.grad)
        head.weight.grad = None
    half = len(results) // 2
    for by_first, by_second in zip(results[:half], results[half:], strict=True):
        assert close(by_first, by_second)


@pytest.mark.parametrize("of_head", [target_log_probs, log_probs_and_entropies])
@pytest.mark.parametrize("is_trained", [False, True])
def test_padding_copies_hidden_states_and_never_logits(
    by_onednn: None, monkeypatch: pytest.MonkeyPatch, is_trained: bool, of_head: Callable[..., Any]
) -> None:
    """Logits are 85 times as large in a real model, and copying them took a tenth of an update."""
    copied: list[torch.Size] = []

    def recorded(rows: torch.Tensor, amounts: tuple[int, ...]) -> torch.Tensor:
        if rows.is_floating_point():  # not the targets
            copied.append(rows.shape)
        return functional.pad(rows, amounts)

    monkeypatch.setattr(matrix_products, "pad", recorded)
    head = nn.Linear(384, 320, bias=False).requires_grad_(is_trained)
    hidden = torch.randn(41, 384, requires_grad=True)
    outputs = of_head(hidden, head, torch.randint(320, (41,)), temperature=1.0, chunk_tokens=35)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(part.sum() for part in parts).backward()
    assert copied
    assert {shape[1] for shape in copied} == {384}


def test_passes_have_whole_blocks_only_for_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    large = nn.Sequential(nn.Linear(384, 320))
    small = nn.Sequential(nn.Linear(384, 128))
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: True)
    assert matrix_products.row_multiple(large) == 16
    assert matrix_products.row_multiple(small) == 1
    assert matrix_products.row_multiple(large.to(torch.bfloat16)) == 1, "PyTorch itself computes these by oneDNN"
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: False)
    assert matrix_products.row_multiple(large.float()) == 1


def test_small_or_other_products_stay_with_pytorch(by_onednn: None) -> None:
    """To the last bit, so that recorded runs of small models hold on every processor."""
    small = torch.randn(128, 384)
    hidden = torch.randn(9, 384)
    assert torch.equal(matrix_products.linear(hidden, small), functional.linear(hidden, small))
    large = torch.randn(LARGE, dtype=torch.float64)
    assert torch.equal(matrix_products.linear(hidden.double(), large), functional.linear(hidden.double(), large))
    layer = nn.Linear(384, 128)
    matrix_products.use_fast_products(layer)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("vendor", "capability", "is_preferred"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "DEFAULT", False),
    ],
)
def test_only_amds_wide_registers_need_onednn(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, capability: str, is_preferred: bool
) -> None:
    monkeypatch.setattr(matrix_products, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    matrix_products.prefers_onednn.cache_clear()
    assert matrix_products.prefers_onednn() is is_preferred
    matrix_products.prefers_onednn.cache_clear()


def test_a_vendor_is_read_from_the_systems_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9355\n")
    monkeypatch.setattr(hardware, "_CPU_FACTS", facts)
    assert hardware.processor_vendor() == "AuthenticAMD"
    assert hardware.processor_name() == "AMD EPYC 9355"
    monkeypatch.setattr(hardware, "_CPU_FACTS", tmp_path / "missing")
    assert hardware.processor_vendor() is None
