"""Entropies of the head's distributions with their gradients, in chunks and for every head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from rounding import GRADIENTS, LOG_PROBS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cepo.models.head import target_log_probs, use_float32_logits
from cepo.models.head_entropy import log_probs_and_entropies
from testing.live_tensors import LiveTensors

TOKENS = 37
HIDDEN = 16
VOCABULARY = 301


class Capped(nn.Module):
    """A head that caps its logits, as Gemma's does."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return 3.0 * torch.tanh(hidden @ self.weight.t() / 3.0)


def head_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A head with random weights: plain, frozen, with a bias, capped, or with float32 logits."""
    model = nn.Module()
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=kind == "bias", dtype=dtype)
    linear.weight.data.copy_(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)))
    linear.weight.requires_grad_(kind != "frozen")
    model.lm_head = linear
    if kind == "float32 logits":
        use_float32_logits(model)
    return Capped(linear.weight.detach()) if kind == "capped" else model.lm_head


@dataclass(frozen=True)
class Inputs:
    """Hidden states and targets, and a loss's factors of the log-probs and of the entropies."""

    hidden: Tensor
    targets: Tensor
    log_prob_factors: Tensor
    entropy_factors: Tensor

    def loss(self, log_probs: Tensor, entropies: Tensor) -> Tensor:
        of_log_probs = self.log_prob_factors.to(log_probs.dtype) * log_probs
        of_entropies = self.entropy_factors.to(entropies.dtype) * entropies
        return (of_log_probs + of_entropies).sum()


def drawn(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    log_prob_factors, entropy_factors = torch.randn(2, TOKENS, generator=generator)
    return Inputs(hidden, targets, log_prob_factors, entropy_factors)


class Exact(NamedTuple):
    """Values in float64, and the gradients of the inputs' loss."""

    log_probs: Tensor
    entropies: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor


def by_autograd(inputs: Inputs, head: Any, temperature: float) -> Exact:
    """The whole of the logits at once."""
    exact = head_of("capped" if isinstance(head, Capped) else "plain").double()
    exact.load_state_dict({"weight": head.weight.detach().double()})
    hidden = inputs.hidden.detach().double().requires_grad_()
    logits = exact(hidden)
    bias = getattr(head, "bias", None)
    if bias is not None:
        logits = logits + bias.detach().double()
    log_p = (logits / temperature).log_softmax(dim=1)
    log_probs = log_p.gather(1, inputs.targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(dim=1)
    loss = inputs.loss(log_probs, entropies)
    hidden_gradient, weight_gradient = torch.autograd.grad(loss, (hidden, exact.weight))
    return Exact(log_probs.detach(), entropies.detach(), hidden_gradient, weight_gradient)


def largest_gap(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach() - expected).abs().max())


def relative_gap(gradient: Tensor | None, expected: Tensor) -> float:
    assert gradient is not None
    return float((gradient.double() - expected).norm() / expected.norm())


KINDS = ("plain", "frozen", "bias", "capped", "float32 logits")


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_entropies_and_their_gradients_are_autograds(kind: str, temperature: float, chunk_tokens: int) -> None:
    head = head_of(kind)
    inputs = drawn()
    options: Any = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    log_probs, entropies = log_probs_and_entropies(inputs.hidden, head, inputs.targets, **options)
    inputs.loss(log_probs, entropies).backward()
    expected = by_autograd(inputs, head, temperature)
    assert largest_gap(log_probs, expected.log_probs) < LOG_PROBS
    assert largest_gap(entropies, expected.entropies) < LOG_PROBS
    assert relative_gap(inputs.hidden.grad, expected.hidden_gradient) < GRADIENTS
    if kind == "frozen":
        assert head.weight.grad is None
    else:
        assert relative_gap(head.weight.grad, expected.weight_gradient) < GRADIENTS
    with torch.no_grad():
        without_gradient = log_probs_and_entropies(inputs.hidden, head, inputs.targets, **options)
    torch.testing.assert_close(without_gradient, (log_probs, entropies), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["plain", "bias", "capped"])
def test_a_float64_head_has_float64_entropies(kind: str) -> None:
    """Both values keep the precision of the logits, whatever the head; in float32 they would be 1e-7 off."""
    head = head_of(kind, torch.float64).double()
    inputs = drawn(torch.float64)
    log_probs, entropies = log_probs_and_entropies(inputs.hidden, head, inputs.targets, temperature=0.7, chunk_tokens=8)
    expected = by_autograd(inputs, head, 0.7)
    assert log_probs.dtype is torch.float64
    assert entropies.dtype is torch.float64
    assert largest_gap(log_probs, expected.log_probs) < 1e-12
    assert largest_gap(entropies, expected.entropies) < 1e-12


def test_entropies_of_known_distributions() -> None:
    """Equal logits have ln V; two equal ones far above the others ln 2; a single one 0, with no gradient that is no number."""
    logits = torch.zeros(4, 8)
    logits[1, :2] = 60.0
    logits[2, 3] = 200.0
    logits[3, 3] = 1e30
    head = nn.Linear(8, 8, bias=False)
    head.weight.data.copy_(torch.eye(8))
    hidden = logits.requires_grad_()
    targets = torch.full((4,), 3)
    log_probs, entropies = log_probs_and_entropies(hidden, head, targets, temperature=1.0, chunk_tokens=4)
    assert entropies.tolist() == pytest.approx([math.log(8), math.log(2), 0.0, 0.0], abs=1e-6)
    assert log_probs[:3].tolist() == pytest.approx([-math.log(8), -60.0 - math.log(2), 0.0], abs=1e-5)
    (gradient,) = torch.autograd.grad(entropies.sum(), hidden)
    assert gradient.isfinite().all()
    assert float(gradient[0].abs().max()) < 1e-6, "the largest entropy has no direction"


def test_no_token_has_no_entropy() -> None:
    head = head_of("plain")
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    log_probs, entropies = log_probs_and_entropies(
        hidden, head, torch.zeros(0, dtype=torch.long), temperature=1.0, chunk_tokens=8
    )
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)
    assert head.weight.grad is not None
    assert not torch.as_tensor(head.weight.grad).any()


def test_bf16_gradients_differ_by_the_rounding_of_bf16() -> None:
    head = head_of("float32 logits", torch.bfloat16)
    inputs = drawn(torch.bfloat16)
    log_probs, entropies = log_probs_and_entropies(inputs.hidden, head, inputs.targets, temperature=1.0, chunk_tokens=8)
    inputs.loss(log_probs, entropies).backward()
    expected = by_autograd(inputs, head, 1.0)
    assert log_probs.dtype is torch.float32
    assert entropies.dtype is torch.float32
    assert largest_gap(log_probs, expected.log_probs) < LOG_PROBS
    assert largest_gap(entropies, expected.entropies) < LOG_PROBS
    for tensor, gradient in ((inputs.hidden, expected.hidden_gradient), (head.weight, expected.weight_gradient)):
        assert tensor.grad is not None
        assert tensor.grad.dtype is torch.bfloat16
        assert relative_gap(tensor.grad, gradient) < 2**-7


@pytest.mark.parametrize(("kind", "backward"), [("plain", 3), ("frozen", 2)])
def test_entropies_cost_no_further_product_of_a_trained_head(kind: str, backward: int) -> None:
    """With log-probs alone a trained head has 1 and 3 products of tokens and vocabulary, a frozen one 2 and 0."""
    head = head_of(kind)
    inputs = drawn()
    with FlopCounterMode(display=False) as there:
        log_probs, entropies = log_probs_and_entropies(
            inputs.hidden, head, inputs.targets, temperature=1.0, chunk_tokens=8
        )
    loss = (log_probs + entropies).sum()
    with FlopCounterMode(display=False) as back:
        loss.backward()
    product = 2 * TOKENS * HIDDEN * VOCABULARY
    assert there.get_total_flops() == product
    assert back.get_total_flops() == backward * product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False])
def test_entropies_take_no_more_memory_than_log_probs(dtype: torch.dtype, trained: bool) -> None:
    """Of tensors of tokens and vocabulary: 64 tokens in chunks of 16, with 4,096 entries of up to 4 bytes."""
    model = nn.Module()
    model.lm_head = nn.Linear(HIDDEN, 4096, bias=False, dtype=dtype).requires_grad_(trained)
    use_float32_logits(model)
    head = model.lm_head
    assert isinstance(head, nn.Module)
    hidden = torch.randn(64, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 4096, (64,))
    peaks: list[int] = []
    for has_entropy in (False, True):
        with LiveTensors(floor=8 * 4096 * 2) as live:
            if has_entropy:
                log_probs, entropies = log_probs_and_entropies(hidden, head, targets, temperature=0.7, chunk_tokens=16)
                (log_probs + entropies).sum().backward()
            else:
                target_log_probs(hidden, head, targets, temperature=0.7, chunk_tokens=16).sum().backward()
        peaks.append(live.peak)
    without, with_entropy = peaks
    assert without >= 16 * 4096 * 4
    assert with_entropy <= 1.25 * without
