"""Computes a graph that torch has compiled for a card on the processor, by Triton's interpreter.

    TRITON_INTERPRET=1 python -m lab.gpu_dry.interpreted FOLDER

FOLDER has `call.pt`: the sources of a forward and a backward graph, the forward graph's arguments, and the gradient of its
output. The results are written beside it, as `results.pt`: the output, and the gradients of the arguments that need one.
Memory that a kernel does not write is no number. The variable must be set before Triton is imported.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ENTRIES_OF_PROGRAM = 64
"""What one program of a kernel with one axis computes: any power of 2 gives the same values."""
KINDS_OF_KERNELS = ("template", "pointwise", "reduction", "persistent_reduction")

OTHER_DEVICE = (
    (r"torch\.cuda\._DeviceGuard\(0\)", "__import__('contextlib').nullcontext()"),
    (r"torch\.cuda\.set_device\(0\)", "pass"),
    (r"get_raw_stream\(0\)", "None"),
    (r"(?m)^empty_strided_cuda = .*$", "empty_strided_cuda = _empty"),
    (r"(?m)^async_compile = .*$", "async_compile = _compiler"),
    (r"async_compile\.wait\(globals\(\)\)", "pass"),
    (r"triton_helpers\.set_driver_to_gpu\(\)", ""),
)
"""What in a graph's source names the card, and what stands for it."""


class Kernel:
    """A kernel as its graph calls it: with its arguments and, for templates, the numbers of programs."""

    def __init__(self, function: Any, facts: dict[str, Any]) -> None:
        self._function = function
        self._facts = facts

    def run(self, *arguments: Any, stream: None) -> None:
        if self._facts["grid_type"] == "FixedGrid":
            *values, x, y, z = arguments
            self._function[(x, y, z)](*values)
            return
        assert self._facts["grid_type"] == "Grid1D", f"a grid of another kind: {self._facts['grid_type']}"
        entries = arguments[self._function.arg_names.index("xnumel")]
        self._function[(-(-entries // ENTRIES_OF_PROGRAM),)](*arguments, XBLOCK=ENTRIES_OF_PROGRAM)


def kernel(folder: Path, name: str, source: str, device_str: str) -> Kernel:
    """Stands for inductor's compiler: returns the kernel of a source, which Triton interprets from a file in `folder`."""
    from torch._inductor.runtime import triton_heuristics

    def interpreted(**settings: Any) -> Callable[[Any], Kernel]:
        return lambda function: Kernel(function, settings["inductor_meta"])

    kinds = {kind: getattr(triton_heuristics, kind) for kind in KINDS_OF_KERNELS}
    file = folder / f"{name}.py"
    text = _on_processor(source)
    file.write_text(text, encoding="utf-8")
    names: dict[str, Any] = {"__file__": str(file), "__name__": name}
    try:
        for kind in kinds:
            setattr(triton_heuristics, kind, interpreted)
        exec(compile(text, file, "exec"), names)
    finally:
        for kind, decorator in kinds.items():
            setattr(triton_heuristics, kind, decorator)
    return names[name]


def graph(folder: Path, source: str) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns the function of a compiled graph's source, for tensors on the processor; the new `folder` gets its kernels."""
    folder.mkdir()
    compiler = SimpleNamespace(triton=functools.partial(kernel, folder))
    names: dict[str, Any] = {"_compiler": compiler, "_empty": _empty, "__name__": "graph"}
    exec(compile(_on_processor(source), "<graph>", "exec"), names)
    return names["call"]


def _on_processor(source: str) -> str:
    for pattern, replacement in OTHER_DEVICE:
        source = re.sub(pattern, replacement, source)
    return source


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    empty = torch.empty_strided(size, stride, dtype=dtype)
    return empty.fill_(float("nan")) if dtype.is_floating_point else empty


def main(folder: Path) -> None:
    call = torch.load(folder / "call.pt")
    output, *saved = graph(folder / "forward", call["forward"])(list(call["arguments"]))
    sizes = [value for value in saved if isinstance(value, int)]
    tensors = [value for value in saved if isinstance(value, Tensor)]
    found = graph(folder / "backward", call["backward"])([*sizes, *tensors, call["gradient"]])
    gradients = [value for value in found if isinstance(value, Tensor)]
    torch.save({"output": output, "gradients": gradients}, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
