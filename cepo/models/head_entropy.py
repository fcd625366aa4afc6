"""Computes token log-probabilities together with the entropies of their distributions, both with gradient.

With `z = W h / temperature`, `p = softmax(z)`, `log P(y) = z_y - logsumexp(z)` and `H = -sum_v p_v log p_v`, a loss with
gradient `a` in `log P(y)` and `b` in `H` has this gradient in the logits:

    d/dz_v = a (onehot(y)_v - p_v) - b p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cepo.losses.recomputation import recomputed_in_chunks
from cepo.models.cpu.matrix_products import in_whole_blocks, multiply, weight_gradient
from cepo.models.head import chunks, is_plain, logits_product, vocabulary_log_probs


def log_probs_and_entropies(
    hidden: Float[Tensor, "N H"],
    head: nn.Module,
    targets: Int64[Tensor, " N"],
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Computes `log P(y_n)` and the entropy `-sum_v P_n(v) log P_n(v)` in nats, with `P = softmax(head(h) / temperature)`.

    Both are float32 (float64 from float64 logits) and differentiable. No tensor of tokens x vocabulary outlives its chunk:
    the backward pass computes a chunk's logits again. A chunk holds two such tensors where `target_log_probs` holds one,
    and therefore has half of `chunk_tokens` tokens.
    """
    size = max(1, chunk_tokens // 2)
    if not is_plain(head):
        return _by_recomputation(hidden, head, targets, temperature, size)
    weight: Any = head.weight
    num_tokens = len(targets)
    hidden, targets, size = in_whole_blocks(hidden, targets, size, weight)
    outputs: Any = _LogProbsAndEntropies.apply(hidden, weight, targets, logits_product(head), temperature, size)
    log_probs, entropies = outputs
    return log_probs[:num_tokens].clone(), entropies[:num_tokens].clone()  # FSDP hooks no views


class Statistics(NamedTuple):
    """What the gradient needs of each token's distribution; all (n,)."""

    log_probs: Tensor  # of the targets
    entropies: Tensor
    normalisers: Tensor  # logsumexp(z)


class _LogProbsAndEntropies(torch.autograd.Function):
    """`product` computes the logits from hidden states and weight."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        product: Callable[[Tensor, Tensor], Tensor],
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        parts: list[Statistics] = []
        for chunk in chunks(max(len(targets), 1), chunk_tokens):  # one empty chunk for no tokens
            logits = product(hidden[chunk], weight)  # (n, V)
            parts.append(_statistics(logits, targets[chunk], temperature))
        log_probs = torch.cat([part.log_probs for part in parts])
        entropies = torch.cat([part.entropies for part in parts])
        normalisers = torch.cat([part.normalisers for part in parts])
        ctx.save_for_backward(hidden, weight, targets, entropies, normalisers)
        ctx.product = product
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_log_probs: Tensor, to_entropies: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, entropies, normalisers = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = None
        if needs_weight:
            to_weight = torch.zeros(weight.shape, dtype=entropies.dtype, device=weight.device)
        for chunk in chunks(len(targets), ctx.chunk_tokens):
            logits = ctx.product(hidden[chunk], weight)  # (n, V)
            _gradient_in_place(
                logits,
                targets[chunk],
                ctx.temperature,
                entropies=entropies[chunk],
                normalisers=normalisers[chunk],
                to_log_probs=to_log_probs[chunk],
                to_entropies=to_entropies[chunk],
            )
            to_logits = logits.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[chunk] = multiply(to_logits, weight)
            if to_weight is not None:
                to_weight += weight_gradient(to_logits, hidden[chunk])
        if to_weight is not None:
            to_weight = to_weight.to(weight.dtype)
        return to_hidden, to_weight, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns the logits over the temperature, in float32 or float64; overwrites logits of these types."""
    scaled = logits if logits.dtype is torch.float64 else logits.float()
    return scaled if temperature == 1 else scaled.div_(temperature)


def _statistics(logits: Float[Tensor, "n V"], targets: Int64[Tensor, " n"], temperature: float) -> Statistics:
    """Computes what the loss and its gradient need of each row of unscaled `logits`, which may be overwritten."""
    scaled = _scaled(logits, temperature)  # (n, V)
    highest = scaled.amax(dim=1, keepdim=True)  # (n, 1), as all below
    scaled.sub_(highest)
    at_target = scaled.gather(1, targets.unsqueeze(1))
    weights = scaled.exp()  # p without its normaliser
    total = weights.sum(dim=1, keepdim=True)
    log_total = total.log()
    # H = log(total) - sum_v p_v (z_v - highest), in which nothing large cancels.
    mean_shift = weights.mul_(scaled).sum(dim=1, keepdim=True) / total
    return Statistics(
        log_probs=(at_target - log_total).squeeze(1),
        entropies=(log_total - mean_shift).squeeze(1),
        normalisers=(highest + log_total).squeeze(1),
    )


def _gradient_in_place(
    logits: Float[Tensor, "n V"],
    targets: Int64[Tensor, " n"],
    temperature: float,
    *,
    entropies: Float[Tensor, " n"],
    normalisers: Float[Tensor, " n"],
    to_log_probs: Float[Tensor, " n"],
    to_entropies: Float[Tensor, " n"],
) -> None:
    """Overwrites unscaled `logits` with the loss's gradient in them, in their own type.

    `to_log_probs` and `to_entropies` are the loss's gradients in the results of `log_probs_and_entropies`.
    """
    log_p = _scaled(logits, temperature).sub_(normalisers.unsqueeze(1))  # (n, V)
    p = log_p.exp()
    to_log_prob = to_log_probs.unsqueeze(1)  # (n, 1)
    # -p (a + b (log p + H)), in place, and a at the target
    gradient = log_p.add_(entropies.unsqueeze(1))
    gradient.mul_(to_entropies.unsqueeze(1)).add_(to_log_prob)
    gradient.mul_(p).neg_()
    gradient.scatter_add_(1, targets.unsqueeze(1), to_log_prob.to(gradient.dtype))
    gradient.div_(temperature)
    if gradient is not logits:
        logits.copy_(gradient)


def _by_recomputation(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Computes the same for other heads, such as one with an adapter or a bias; the backward pass recomputes chunks."""

    def values_of(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, log_p = vocabulary_log_probs(hidden, head, targets, temperature)  # (n,), (n, V)
        entropies = -(log_p.exp() * log_p).sum(dim=1)
        return log_probs, entropies

    log_probs, entropies = recomputed_in_chunks(values_of, (hidden, targets), chunk_tokens)
    return log_probs, entropies
