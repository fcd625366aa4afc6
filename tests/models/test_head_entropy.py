"""Entropies of the head's distributions with their gradients, in chunks and for every head."""

from __future__ import annotations

import math
from typing import Any

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


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, targets, and the loss's factors of log-probs and entropies."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    log_prob_factors, entropy_factors = torch.randn(2, TOKENS, generator=generator)
    return hidden, targets, log_prob_factors, entropy_factors


def by_autograd(
    hidden: Tensor, head: Any, targets: Tensor, factors: tuple[Tensor, Tensor], temperature: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies, and the gradients in hidden states and weight, at once in float64."""
    exact = head_of("capped" if isinstance(head, Capped) else "plain").double()
    exact.load_state_dict({"weight": head.weight.detach().double()})
    states = hidden.detach().double().requires_grad_()
    logits = exact(states)
    bias = getattr(head, "bias", None)
    if bias is not None:
        logits = logits + bias.detach().double()
    log_p = (logits / temperature).log_softmax(dim=1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(dim=1)
    loss = (factors[0].double() * log_probs + factors[1].double() * entropies).sum()
    gradients = torch.autograd.grad(loss, (states, exact.weight))
    return [log_probs.detach(), entropies.detach()], list(gradients)


KINDS = ("plain", "frozen", "bias", "capped", "float32 logits")


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_entropies_and_their_gradients_are_autograds(kind: str, temperature: float, chunk_tokens: int) -> None:
    head = head_of(kind)
    hidden, targets, *factors = drawn()
    found = log_probs_and_entropies(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    (factors[0] * found[0] + factors[1] * found[1]).sum().backward()
    expected, gradients = by_autograd(hidden, head, targets, (factors[0], factors[1]), temperature)
    for values, wanted in zip(found, expected, strict=True):
        assert float((values.detach() - wanted).abs().max()) < LOG_PROBS
    trained = (hidden,) if kind == "frozen" else (hidden, head.weight)
    for tensor, wanted in zip(trained, gradients, strict=False):
        assert isinstance(tensor, Tensor)
        assert tensor.grad is not None
        assert float((tensor.grad - wanted).norm() / wanted.norm()) < GRADIENTS
    assert kind != "frozen" or head.weight.grad is None
    with torch.no_grad():
        again = log_probs_and_entropies(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("kind", ["plain", "bias", "capped"])
def test_a_float64_head_has_float64_entropies(kind: str) -> None:
    """Both values keep the precision of the logits, whatever the head; in float32 they would be 1e-7 off."""
    head = head_of(kind, torch.float64).double()
    hidden, targets, *factors = drawn(torch.float64)
    found = log_probs_and_entropies(hidden, head, targets, temperature=0.7, chunk_tokens=8)
    expected, _ = by_autograd(hidden, head, targets, (factors[0], factors[1]), 0.7)
    for values, wanted in zip(found, expected, strict=True):
        assert values.dtype is torch.float64
        assert float((values.detach() - wanted).abs().max()) < 1e-12


def test_entropies_of_known_distributions() -> None:
    """Equal logits have ln V; two equal ones far above the others ln 2; a single one 0, with no gradient that is no number."""
    logits = torch.zeros(4, 8)
    logits[1, :2] = 60.0
    logits[2, 3] = 200.0
    logits[3, 3] = 1e30
    head = nn.Linear(8, 8, bias=False)
    head.weight.data.copy_(torch.eye(8))
    hidden = logits.requires_grad_()
    log_probs, entropies = log_probs_and_entropies(hidden, head, torch.full((4,), 3), temperature=1.0, chunk_tokens=4)
    assert entropies.tolist() == pytest.approx([math.log(8), math.log(2), 0.0, 0.0], abs=1e-6)
    assert log_probs.tolist()[:3] == pytest.approx([-math.log(8), -60.0 - math.log(2), 0.0], abs=1e-5)
    entropies.sum().backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())
    assert float(hidden.grad[0].abs().max()) < 1e-6, "the largest entropy has no direction"


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
    hidden, targets, *factors = drawn(torch.bfloat16)
    found = log_probs_and_entropies(hidden, head, targets, temperature=1.0, chunk_tokens=8)
    (factors[0] * found[0] + factors[1] * found[1]).sum().backward()
    expected, gradients = by_autograd(hidden, head, targets, (factors[0], factors[1]), 1.0)
    for values, wanted in zip(found, expected, strict=True):
        assert values.dtype is torch.float32
        assert float((values.detach() - wanted).abs().max()) < LOG_PROBS
    for tensor, wanted in zip((hidden, head.weight), gradients, strict=True):
        assert isinstance(tensor, Tensor)
        assert tensor.grad is not None
        assert tensor.grad.dtype is torch.bfloat16
        assert float((tensor.grad.double() - wanted).norm() / wanted.norm()) < 2**-7


@pytest.mark.parametrize(("kind", "backward"), [("plain", 3), ("frozen", 2)])
def test_entropies_cost_no_further_product_of_a_trained_head(kind: str, backward: int) -> None:
    """With log-probs alone a trained head has 1 and 3 products of tokens and vocabulary, a frozen one 2 and 0."""
    head = head_of(kind)
    hidden, targets, *_ = drawn()
    with FlopCounterMode(display=False) as there:
        log_probs, entropies = log_probs_and_entropies(hidden, head, targets, temperature=1.0, chunk_tokens=8)
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
