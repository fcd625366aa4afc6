"""Compiles the trainer's packed attention, forward and backward, at a model's shapes for the card."""

from __future__ import annotations

import sys
from typing import Any

import torch

from cepo.models.segments import SegmentLayout, attend_by_blocks
from lab.gpu_dry.cards import report
from lab.gpu_dry.kernels import shared_memory
from testing.shapes import SHAPES


def attend(shape: str, dtype: torch.dtype, length: int) -> None:
    """Runs the attention of a row of `length` tokens with and without gradient."""
    sizes = SHAPES[shape]
    layout = SegmentLayout(starts=(0, 100, 300, length), branch_ends=(length, 300, length))

    def tokens(heads: int) -> torch.Tensor:
        return torch.zeros(1, heads, length, sizes.head_width, device="cuda", dtype=dtype, requires_grad=True)

    inputs = (tokens(sizes.heads), tokens(sizes.key_value_heads), tokens(sizes.key_value_heads))
    scale = sizes.head_width**-0.5
    with torch.no_grad():
        attend_by_blocks(*inputs, layout, scale)
    torch.autograd.grad(attend_by_blocks(*inputs, layout, scale).sum(), inputs)


def main(shape: str, dtype: str) -> None:
    """Reports the shared memory of both kernels; a kernel that does not fit is only a fault in 16 bits.

    In float32 the run then pads its rows, as `cepo.workers.batching` does after any such error.
    """
    available = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    error: Any = None
    try:
        for length in (512, 1024):  # the second length is compiled for all others
            attend(shape, getattr(torch, dtype), length)
    except RuntimeError as caught:
        error = caught
    kernels = {name: size for name, size in shared_memory().items() if "_tem_" in name}
    needed = {
        way: [size for name, size in kernels.items() if ("backward" in name) == (way == "backward")]
        for way in ("forward", "backward")
    }
    sizes = ", ".join(f"{way} {max(found):,} B" for way, found in needed.items() if found)
    fits = error is None and all(size <= available for size in kernels.values())
    if error is not None and "out of resource" not in str(error).lower():
        raise error
    verdict = "fits" if fits else "does not fit: padded rows"
    report(ok=fits or dtype == "float32", found=f"{sizes} of {available:,} B: {verdict}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
