"""Computes large float32 matrix products on a CPU by the faster of two libraries.

PyTorch computes float32 products by MKL. On AMD processors with AVX-512 MKL uses only half of a register's width, while
oneDNN, by which PyTorch computes bf16 products, uses all of it: 250 against 110 GFLOPS on one core of a fifth-generation
EPYC, for products of 64 x 576 by 576 x 3072 and larger (`python -m lab.products`). Both compute in float32; they differ in
the order of summation.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import pad

from cepo.hardware import processor_vendor

_FEWEST_WEIGHTS = 100_000
"""Smaller matrices are left to PyTorch: the choice hardly matters for them, and it would change recorded toy runs."""
_ROW_MULTIPLE = 16
"""The rows of an operand of oneDNN, one for each token, are padded to a multiple of this number.

oneDNN compiles code for each shape of a product and keeps it, about 0.6 MB. A training run has passes of hundreds of
lengths, whose code took up to 0.9 GB. Padding copies the operand, which can take a tenth of a product's time, so passes have
such a number of tokens from the start (`row_multiple`), and so have the chunks of the head (`in_whole_blocks`).
"""


@cache
def prefers_onednn() -> bool:
    """Returns whether oneDNN is the faster library on this processor."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return processor_vendor() == "AuthenticAMD" and has_avx512 and torch.backends.mkldnn.is_available()


def linear(
    hidden: Float[Tensor, "*N in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*N out"]:
    """Computes a differentiable `hidden @ weight.T + bias`, as `torch.nn.functional.linear` does."""
    if not _is_for_onednn(hidden, weight, weight.numel()):
        return functional.linear(hidden, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(hidden, weight, bias)  # pyright: ignore[reportReturnType]
    return by_onednn(hidden, weight, bias)


def multiply(left: Float[Tensor, "n k"], weight: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    """Computes `left @ weight` without a gradient."""
    if not _is_for_onednn(left, weight, weight.numel()):
        return left @ weight
    return by_onednn(left, weight.t())


def add_product(
    residual: Float[Tensor, "n m"], left: Float[Tensor, "n k"], weight: Float[Tensor, "k m"]
) -> Float[Tensor, "n m"]:
    """Computes `residual + left @ weight` without a gradient."""
    if not _is_for_onednn(left, weight, weight.numel()):
        return torch.addmm(residual, left, weight)
    return by_onednn(left, weight.t()).add_(residual)


def weight_gradient(gradient: Float[Tensor, "n out"], hidden: Float[Tensor, "n in"]) -> Float[Tensor, "out in"]:
    """Computes `gradient.T @ hidden`, the gradient of a linear layer's weight."""
    num_weights = gradient.shape[1] * hidden.shape[1]
    if not _is_for_onednn(hidden, hidden, num_weights):
        return gradient.t() @ hidden
    return by_onednn(_with_padded_rows(gradient).t(), _with_padded_rows(hidden).t())


def use_fast_products(model: nn.Module) -> None:
    """Makes the large linear layers of `model` compute by `linear` where that is faster.

    They keep their class, so that adapters, quantisation and sharding find what they expect.
    """
    if not prefers_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _FEWEST_WEIGHTS:
            module.forward = MethodType(_forward, module)


def row_multiple(model: nn.Module) -> int:
    """Returns the number of which a pass of `model` should have a multiple of tokens, so that no operand is copied."""
    for module in model.modules():
        if type(module) is nn.Linear and _is_for_onednn(module.weight, module.weight, module.weight.numel()):
            return _ROW_MULTIPLE
    return 1


def in_whole_blocks(
    hidden: Float[Tensor, "n in"], targets: Int64[Tensor, " n"], chunk_tokens: int, weight: Float[Tensor, "out in"]
) -> tuple[Float[Tensor, "m in"], Int64[Tensor, " m"], int]:
    """Returns tokens with zeros behind them, and the size of their chunks, so that a head's products copy no logits.

    Where oneDNN does not compute `hidden @ weight.T`, everything is returned as it is.
    """
    if not _is_for_onednn(hidden, weight, weight.numel()):
        return hidden, targets, chunk_tokens
    num_missing = -len(hidden) % _ROW_MULTIPLE
    whole_chunk = max(1, chunk_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return _with_padded_rows(hidden), pad(targets, (0, num_missing)), whole_chunk


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _is_for_onednn(left: Tensor, right: Tensor, num_weights: int) -> bool:
    """Whether oneDNN is faster here for a product of these operands, one of which is a matrix of `num_weights`."""
    if num_weights < _FEWEST_WEIGHTS or left.device.type != "cpu":
        return False
    return left.dtype is torch.float32 and right.dtype is torch.float32 and prefers_onednn()


def by_onednn(
    hidden: Float[Tensor, "*N in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*N out"]:
    """Computes `hidden @ weight.T + bias` by oneDNN, without a gradient; the operands may be transposed views."""
    rows = hidden.flatten(0, -2)  # (n, in)
    # The operation of PyTorch's compiler for a linear layer with an activation, here with none.
    product = torch.ops.mkldnn._linear_pointwise(_with_padded_rows(rows), weight, bias, "none", [], "")
    # Not a slice: a view could not be changed in place, as adapters do.
    return product.resize_(*hidden.shape[:-1], len(weight))


def _with_padded_rows(rows: Float[Tensor, "n in"]) -> Float[Tensor, "m in"]:
    """Appends rows of zeros up to a multiple of `_ROW_MULTIPLE`."""
    num_missing = -len(rows) % _ROW_MULTIPLE
    return pad(rows, (0, 0, 0, num_missing)) if num_missing else rows


class _Linear(torch.autograd.Function):
    """Computes `y = x W^T + b` and its gradients `dx = dy W`, `dW = dy^T x` and `db = sum(dy)` by oneDNN."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        # A frozen layer, as under an adapter, need not keep its input.
        ctx.save_for_backward(hidden if needs_weight else None, weight if needs_hidden else None)
        return by_onednn(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        _, _, needs_bias = ctx.needs_input_grad
        flat_gradient = gradient.flatten(0, -2)  # (n, out)
        to_hidden = to_weight = to_bias = None
        if weight is not None:
            to_hidden = by_onednn(gradient, weight.t())
        if hidden is not None:
            to_weight = weight_gradient(flat_gradient, hidden.flatten(0, -2))
        if needs_bias:
            to_bias = flat_gradient.sum(dim=0)
        return to_hidden, to_weight, to_bias
