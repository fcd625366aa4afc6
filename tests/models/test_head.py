"""Log-probs and gradients of the language head: chunks, frozen and trained heads, the GPU's kernel in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rounding import GRADIENTS, LOG_PROBS, sum_of_products
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cepo.errors import ConfigError
from cepo.models.head import (
    Float32LogitsHead,
    divergence_chunk_tokens,
    float32_logits,
    head_chunk_tokens,
    replaced_weight,
    target_log_probs,
    use_float32_logits,
)

TOKENS = 37
HIDDEN = 16
VOCABULARY = 301
NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; it comes with torch for GPUs and with vLLM"
)


def build_head(*, trained: bool, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype).requires_grad_(trained)
    head.weight.data.copy_(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)))
    return head


def realistic_head(*, trained: bool, bias: bool = False) -> Float32LogitsHead:
    """In bf16, with a largest logit of about 24 for the hidden states of `draw`."""
    model = nn.Module()
    model.lm_head = plain = build_head(trained=trained, bias=bias, dtype=torch.bfloat16)
    plain.weight.data.mul_(2)
    use_float32_logits(model)
    head = model.lm_head
    assert isinstance(head, Float32LogitsHead)
    assert head.weight is plain.weight
    return head


def draw(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets and the factors of the loss."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return hidden, targets, torch.randn(tokens, generator=generator)


class Dense(NamedTuple):
    """Log-probs and the gradients of the loss in hidden states and weight, in float64 and at once."""

    log_probs: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor


def dense(hidden: Tensor, head: nn.Linear, targets: Tensor, factors: Tensor, temperature: float) -> Dense:
    states = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    logits = states @ weight.t()
    if head.bias is not None:
        logits = logits + head.bias.detach().double()
    log_p = (logits / temperature).log_softmax(dim=1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    loss = (factors.double() * log_probs).sum()
    hidden_gradient, weight_gradient = torch.autograd.grad(loss, (states, weight))
    return Dense(log_probs.detach(), hidden_gradient, weight_gradient)


def relative_gap(gradient: Tensor | None, expected: Tensor) -> float:
    assert gradient is not None
    return float((gradient.double() - expected).norm() / expected.norm())


class Compared(NamedTuple):
    hidden: Tensor
    targets: Tensor
    log_probs: Tensor
    expected_log_probs: Tensor


def compare_with_dense(head: nn.Linear, temperature: float, chunk_tokens: int, limit: float) -> Compared:
    """Holds log-probs to the dense ones, and to `limit` the gradients of hidden states and of a trained weight."""
    hidden, targets, factors = draw(head.weight.dtype)
    expected = dense(hidden, head, targets, factors, temperature)
    log_probs = target_log_probs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    (factors * log_probs).sum().backward()
    assert float((log_probs.detach() - expected.log_probs).abs().max()) < LOG_PROBS
    assert relative_gap(hidden.grad, expected.hidden_gradient) < limit
    if head.weight.requires_grad:
        assert relative_gap(head.weight.grad, expected.weight_gradient) < limit
    else:
        assert head.weight.grad is None
    return Compared(hidden.detach(), targets, log_probs.detach(), expected.log_probs)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("trained", "bias"), [(False, False), (True, False), (True, True)])
def test_head_log_probs_and_gradients_are_the_dense_ones(
    trained: bool, bias: bool, temperature: float, chunk_tokens: int
) -> None:
    head = build_head(trained=trained, bias=bias)
    compared = compare_with_dense(head, temperature, chunk_tokens, GRADIENTS)
    with torch.no_grad():
        without_gradient = target_log_probs(
            compared.hidden, head, compared.targets, temperature=temperature, chunk_tokens=chunk_tokens
        )
    assert torch.equal(compared.log_probs, without_gradient)


@pytest.mark.parametrize(("trained", "forward", "backward"), [(False, 2, 0), (True, 1, 3)])
def test_under_a_frozen_head_backward_skips_the_vocabulary(trained: bool, forward: int, backward: int) -> None:
    head = build_head(trained=trained)
    hidden, targets, factors = draw()
    with FlopCounterMode(display=False) as of_forward:
        log_probs = target_log_probs(hidden, head, targets, temperature=1.0, chunk_tokens=8)
    loss = (factors * log_probs).sum()
    with FlopCounterMode(display=False) as of_backward:
        loss.backward()
    product = 2 * TOKENS * HIDDEN * VOCABULARY
    assert of_forward.get_total_flops() == forward * product
    assert of_backward.get_total_flops() == backward * product


def test_a_trained_bf16_head_sums_its_chunks_in_float32() -> None:
    """A sum of 1,024 chunks in bf16 would be off by more than the limit."""
    head = build_head(trained=True, dtype=torch.bfloat16)
    hidden, targets, factors = draw(torch.bfloat16, 4096)
    expected = dense(hidden, head, targets, factors, 1.0).weight_gradient
    log_probs = target_log_probs(hidden, head, targets, temperature=1.0, chunk_tokens=4)
    (factors * log_probs).sum().backward()
    assert relative_gap(head.weight.grad, expected) < 0.02

    of_a_chunk = (expected / 1024).bfloat16()
    sum_in_bf16 = torch.zeros_like(of_a_chunk)
    for _ in range(1024):
        sum_in_bf16 = sum_in_bf16 + of_a_chunk
    assert relative_gap(sum_in_bf16, expected) > 0.02


@pytest.mark.parametrize(("trained", "bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_with_float32_logits_bf16_log_probs_are_float64s(trained: bool, bias: bool, chunk_tokens: int) -> None:
    head = realistic_head(trained=trained, bias=bias)
    compared = compare_with_dense(head, 1.0, chunk_tokens, 2**-7)
    logits = compared.hidden @ head.weight.detach().t()
    assert 16 < float(logits.amax(dim=1).mean()) < 32
    plain = build_head(trained=False, bias=bias, dtype=torch.bfloat16)
    plain.load_state_dict(head.state_dict())
    with torch.no_grad():
        rounded = target_log_probs(compared.hidden, plain, compared.targets, temperature=1.0, chunk_tokens=chunk_tokens)
    error = rounded - compared.expected_log_probs
    assert float(error.square().mean().sqrt()) > 0.01


@pytest.mark.parametrize("width", [16, 2**17])
def test_float32_logits_and_gradients_are_those_of_float64(width: int) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 3, width, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(70, width, generator=generator).bfloat16().requires_grad_()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    logits = float32_logits(hidden, weight)
    exact = exact_hidden @ exact_weight.t()
    assert logits.dtype is torch.float32
    products = exact_hidden.detach().abs() @ exact_weight.detach().abs().t()
    largest_gap = float((logits - exact).detach().abs().max())
    assert largest_gap < sum_of_products(products, width)
    outer = torch.randn(2, 3, 70, generator=generator)
    loss = (logits * outer).sum()
    exact_loss = (exact * outer).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    exact_gradients = torch.autograd.grad(exact_loss, (exact_hidden, exact_weight))
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype is torch.bfloat16
        assert relative_gap(gradient, expected) < 2**-7


def test_another_weight_gets_logits_of_the_heads_own_type() -> None:
    hidden = draw(torch.bfloat16)[0].detach()
    new_weight = torch.randn(9, HIDDEN).bfloat16()
    exact = replaced_weight(realistic_head(trained=False), new_weight)
    assert callable(exact)
    assert exact(hidden).dtype is torch.float32
    assert replaced_weight(build_head(trained=False, dtype=torch.bfloat16), new_weight) is new_weight
    model = nn.Module()
    model.lm_head = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"head of Module is a Sequential .*fp32_logits=false"):
        use_float32_logits(model)


INTERPRETED = """
import torch
from cepo.models.head import _log_probs_by_torch
from cepo.models.head_kernel import log_probs_in_place
torch.manual_seed(0)
for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
    for rows, vocabulary in ((3, 5000), (2, 4096), (4, 17), (0, 17)):
        for with_direction in (False, True):
            wide = (4 * torch.randn(rows, vocabulary + 3)).to(dtype)
            logits = wide[:, :vocabulary]
            other = logits.clone()
            targets = torch.randint(0, vocabulary, (rows,))
            found = log_probs_in_place(logits, targets, 0.7, with_direction=with_direction)
            expected = _log_probs_by_torch(other, targets, 0.7, with_direction=with_direction)
            assert found.shape == expected.shape == (rows,)
            assert float((found - expected).abs().sum()) < 1e-4, (dtype, rows, vocabulary)
            if with_direction and rows:
                assert float((logits - other).abs().max()) <= limit, (dtype, rows, vocabulary)
try:
    log_probs_in_place(torch.zeros(4, 6).t(), torch.zeros(6, dtype=torch.long), 1.0, with_direction=False)
except ValueError as error:
    print("refused:", error)
"""


@NEEDS_TRITON
@pytest.mark.heavy
def test_the_kernel_computes_what_torch_computes() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: the kernel needs contiguous logits in each row, but their stride is 6")


def kernel_for(capability: int, logits: str) -> Any:
    """The kernel with gradient, compiled as a call on a card of this capability would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cepo.models.head_kernel import _rows

    types = {
        "logits": logits,
        "targets": "*i64",
        "log_probs": "*fp32",
        "vocabulary": "i32",
        "row_stride": "i32",
        "scale": "fp32",
        "block": "constexpr",
        "with_direction": "constexpr",
    }
    # Triton notices arguments that are multiples of 16 (addresses, and 151,936 entries), and reads several at once.
    divisible = {(index,): [["tt.divisibility", 16]] for index in range(5)}
    constants = {"block": 4096, "with_direction": True}
    source: Any = ASTSource(fn=_rows, signature=types, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})


@pytest.mark.heavy
@NEEDS_TRITON
@pytest.mark.parametrize(("capability", "logits"), [(80, "*fp32"), (90, "*bf16"), (100, "*bf16"), (120, "*fp32")])
def test_the_kernel_compiles_for_the_cards_that_it_is_meant_for(
    capability: int, logits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ampere, Hopper, Blackwell: the compiler needs no card to make their machine code.

    A row's warps overwrite its logits in the second loop without waiting for each other. So the target's token and
    logit must be read before the first barrier, which no warp passes until all warps have read them.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = kernel_for(capability, logits)
    ptx: str = kernel.asm["ptx"]
    assert len(kernel.asm["cubin"]) > 10_000
    assert f".target sm_{capability}" in ptx
    assert ".local" not in ptx, "registers are spilled to memory"

    # Entries of a block are read on a condition: where they are inside the row.
    reads_of_target = [load.start() for load in re.finditer(r"^\s*ld\.global", ptx, re.MULTILINE)]
    assert len(reads_of_target) == 2
    assert max(reads_of_target) < ptx.index("bar.sync") < ptx.index("st.global")


def test_chunks_of_qwen3_vls_head_have_their_sizes() -> None:
    """They have 220 tokens on a CPU and 1766 on a GPU, and 62 and 441 for a divergence."""
    cpu = torch.device("cpu")
    gpu = torch.device("cuda")
    assert head_chunk_tokens(cpu, 151_936) == 220
    assert head_chunk_tokens(gpu, 151_936) == 1766
    assert divergence_chunk_tokens(cpu, 151_936) == 62
    assert divergence_chunk_tokens(gpu, 151_936) == 441


def test_a_chunk_has_at_least_one_token() -> None:
    assert head_chunk_tokens(torch.device("cuda"), 2**30) == 1
    assert divergence_chunk_tokens(torch.device("cpu"), 2**30) == 1
