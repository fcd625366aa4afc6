"""Computes log-probabilities and entropies from logits by Triton kernels that read each logit once.

Torch's operations convert 16-bit logits to float32 and read and write them several times, about 26 bytes for each
logit. The kernel of log-probabilities with gradient reads each logit twice and writes it once. With entropies, one kernel
reads each logit once, and another one reads and writes it once for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def log_probs_in_place(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
    """See `cepo.models.head.log_probs_in_place`. One program computes one row of `logits`, which must be contiguous."""
    log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _run(_rows, logits, targets, log_probs, temperature, with_direction=with_direction)
    return log_probs


def _run(kernel: Any, logits: Tensor, targets: Tensor, others: Tensor, temperature: float, **constants: bool) -> None:
    """Runs a kernel with one program for each row of `logits`; `others` are its results or further inputs."""
    if logits.stride(1) != 1:
        raise ValueError(f"the kernel needs contiguous logits in each row, but their stride is {logits.stride(1)}")
    if len(logits) == 0:
        return
    kernel[(len(logits),)](
        logits,
        targets,
        others,
        logits.shape[1],
        logits.stride(0),
        1.0 / temperature,
        block=_BLOCK,
        num_warps=_WARPS,
        **constants,
    )


@triton.jit
def _rows(  # pyright: ignore
    logits, targets, log_probs, vocabulary, row_stride, scale, block: tl.constexpr, with_direction: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary exceeds 32 bits
    row_logits = logits + row * row_stride
    # Read before the first loop, whose barriers all warps pass together: after the last one, a warp that is ahead may
    # already overwrite this logit in the second loop.
    target = tl.load(targets + row)
    at_target = tl.load(row_logits + target).to(tl.float32) * scale
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, block):
        entries = start + tl.arange(0, block)
        values = tl.load(row_logits + entries, mask=entries < vocabulary, other=-float("inf")).to(tl.float32) * scale
        old_highest = highest
        highest = tl.maximum(old_highest, tl.max(values, axis=0))
        total = total * tl.exp(old_highest - highest) + tl.sum(tl.exp(values - highest), axis=0)
    normaliser = highest + tl.log(total)
    tl.store(log_probs + row, at_target - normaliser)
    if with_direction:
        for start in range(0, vocabulary, block):
            entries = start + tl.arange(0, block)
            exists = entries < vocabulary
            values = tl.load(row_logits + entries, mask=exists, other=-float("inf")).to(tl.float32) * scale
            probabilities = tl.exp(values - normaliser)
            direction = tl.where(entries == target, 1.0 - probabilities, -probabilities)
            tl.store(row_logits + entries, direction, mask=exists)


def statistics_of(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `cepo.models.head_entropy.statistics_of`: log-probs, entropies and normalisers, from one read of each logit."""
    results = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _run(_row_statistics, logits, targets, results, temperature)
    log_probs, entropies, normalisers = results
    return log_probs, entropies, normalisers


def gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    to_log_probs: Tensor,
    to_entropies: Tensor,
    temperature: float,
) -> None:
    """See `cepo.models.head_entropy.gradient_in_place`. Each logit is read and written once."""
    factors = torch.stack([normalisers, entropies, to_log_probs, to_entropies])  # (4, n)
    _run(_row_gradients, logits, targets, factors, temperature)


@triton.jit
def _row_statistics(logits, targets, results, vocabulary, row_stride, scale, block: tl.constexpr):  # pyright: ignore
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary exceeds 32 bits
    num_rows = tl.num_programs(0)
    row_logits = logits + row * row_stride
    target = tl.load(targets + row)
    at_target = tl.load(row_logits + target).to(tl.float32) * scale
    highest = -1.0e30  # finite, because -inf times a weight of 0 is no number
    total = 0.0  # sum of exp(z - highest)
    shifts = 0.0  # sum of exp(z - highest) (z - highest)
    for start in range(0, vocabulary, block):
        entries = start + tl.arange(0, block)
        exists = entries < vocabulary
        loaded = tl.load(row_logits + entries, mask=exists, other=0.0).to(tl.float32)
        values = tl.where(exists, loaded * scale, -1.0e30)
        new_highest = tl.maximum(highest, tl.max(values, axis=0))
        rise = highest - new_highest
        shift = values - new_highest
        weights = tl.where(exists, tl.exp(shift), 0.0)
        shifts = tl.exp(rise) * (shifts + rise * total) + tl.sum(weights * shift, axis=0)
        total = tl.exp(rise) * total + tl.sum(weights, axis=0)
        highest = new_highest
    log_total = tl.log(total)
    tl.store(results + row, at_target - highest - log_total)
    tl.store(results + num_rows + row, log_total - shifts / total)
    tl.store(results + 2 * num_rows + row, highest + log_total)


@triton.jit
def _row_gradients(logits, targets, factors, vocabulary, row_stride, scale, block: tl.constexpr):  # pyright: ignore
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    row_logits = logits + row * row_stride
    target = tl.load(targets + row)
    normaliser = tl.load(factors + row)
    entropy = tl.load(factors + num_rows + row)
    to_log_prob = tl.load(factors + 2 * num_rows + row)
    to_entropy = tl.load(factors + 3 * num_rows + row)
    for start in range(0, vocabulary, block):
        entries = start + tl.arange(0, block)
        exists = entries < vocabulary
        values = tl.load(row_logits + entries, mask=exists, other=0.0).to(tl.float32) * scale
        log_p = values - normaliser
        gradient = -tl.exp(log_p) * (to_log_prob + to_entropy * (log_p + entropy))
        gradient = tl.where(entries == target, gradient + to_log_prob, gradient)
        tl.store(row_logits + entries, gradient * scale, mask=exists)
