"""Compiles packed attention for the card, and computes the compiled kernels' values by Triton's interpreter.

    python -m lab.gpu_dry.values SHAPE DTYPE

The output and the gradients of random queries, keys and values are compared with those of `attend_by_parts` in float64.
What no card computes here is thereby computed: masks, tables of blocks, the order of sums. The interpreter takes minutes, so
SHAPE is a small one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph

from cepo.models.segments import SegmentLayout, attend_by_blocks, attend_by_parts
from lab.gpu_dry.cards import report
from testing.shapes import SHAPES

LAYOUT = SegmentLayout(starts=(0, 150, 270, 300, 512), branch_ends=(512, 270, 512, 512))
"""A prompt, a response, and a context with a response of its own: blocks of every kind, in four by four."""
LIMITS = {"float32": 1e-5, "float16": 1e-2}
"""Largest accepted gap to float64, of the norm. The interpreter does not compute in bf16, whose kernels are those of fp16."""


def recorded(inputs: Sequence[Tensor], scale: float) -> list[tuple[str, list[Any]]]:
    """Runs attention forwards and backwards on the card; returns the source and the arguments of each compiled graph."""
    graphs: list[tuple[str, list[Any]]] = []
    call = CompiledFxGraph.__call__

    def recording(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        kept = [value.cpu() if isinstance(value, Tensor) else value for value in inputs]
        graphs.append((self.source_code, kept))
        return call(self, inputs)

    CompiledFxGraph.__call__ = recording
    try:
        on_card = [tensor.cuda().requires_grad_() for tensor in inputs]
        output = attend_by_blocks(on_card[0], on_card[1], on_card[2], LAYOUT, scale)
        torch.autograd.grad(output.sum(), on_card)
    finally:
        CompiledFxGraph.__call__ = call
    return graphs


def interpreted(folder: Path, graphs: list[tuple[str, list[Any]]], gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the output and the gradients that the compiled kernels compute, in a process without the hollow card."""
    (forward, arguments), (backward, _) = graphs
    call = {"forward": forward, "backward": backward, "arguments": arguments, "gradient": gradient}
    torch.save(call, folder / "call.pt")
    hidden = ("LD_PRELOAD", "LD_LIBRARY_PATH")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "lab.gpu_dry.interpreted", str(folder)]
    subprocess.run(command, env=variables, check=True)
    results = torch.load(folder / "results.pt")
    return results["output"], results["gradients"]


def main(shape: str, dtype: str) -> None:
    """Reports how far the compiled kernels' output and gradients are from float64."""
    sizes = SHAPES[shape]
    draw = torch.Generator().manual_seed(0)
    heads = (sizes.heads, sizes.key_value_heads, sizes.key_value_heads)
    inputs: list[Tensor] = []
    for number in heads:
        tokens = torch.randn(1, number, LAYOUT.num_tokens, sizes.head_width, generator=draw)
        inputs.append(tokens.to(getattr(torch, dtype)))
    gradient = torch.randn(inputs[0].shape, generator=draw).to(inputs[0])
    scale = sizes.head_width**-0.5
    with tempfile.TemporaryDirectory() as folder:
        output, gradients = interpreted(Path(folder), recorded(inputs, scale), gradient)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    wanted = attend_by_parts(exact[0], exact[1], exact[2], LAYOUT, scale)
    references = (wanted.detach(), *torch.autograd.grad(wanted, exact, gradient.double()))
    gaps: dict[str, float] = {}
    for name, found, reference in zip(
        ("output", "query", "key", "value"), (output, *gradients), references, strict=True
    ):
        gaps[name] = float((found.reshape(reference.shape).double() - reference).norm() / reference.norm())
    words = ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items())
    report(ok=all(gap <= LIMITS[dtype] for gap in gaps.values()), found=f"of the norm from float64: {words}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
