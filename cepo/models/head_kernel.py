"""Computes log-probabilities from logits by a Triton kernel.

Torch's operations convert 16-bit logits to float32 and read and write them several times, about 26 bytes for each
logit. The kernel reads each logit once or, with gradient, twice, and then writes it once.
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
    if logits.stride(1) != 1:
        raise ValueError(f"the kernel needs contiguous logits in each row, but their stride is {logits.stride(1)}")
    log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return log_probs
    kernel: Any = _rows[(len(logits),)]
    kernel(
        logits,
        targets,
        log_probs,
        logits.shape[1],
        logits.stride(0),
        1.0 / temperature,
        block=_BLOCK,
        num_warps=_WARPS,
        with_direction=with_direction,
    )
    return log_probs


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
