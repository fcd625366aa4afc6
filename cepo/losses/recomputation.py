"""Computes what a head gives for many tokens, in chunks that the backward pass computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]


def recomputed_in_chunks(
    compute: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], chunk_tokens: int
) -> tuple[Tensor, ...]:
    """Returns the results of `compute` for all tokens, the first axis of each input and result.

    It gets `chunk_tokens` tokens at a time. No tensor of tokens x vocabulary outlives its chunk, forward or backward.
    """
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(inputs[0]), 1), chunk_tokens):  # one empty chunk for no tokens
        chunk = [values[start : start + chunk_tokens] for values in inputs]
        if torch.is_grad_enabled():
            parts.append(cast("tuple[Tensor, ...]", checkpoint(compute, *chunk, use_reentrant=False)))
        else:
            parts.append(compute(*chunk))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))
