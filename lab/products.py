"""Measures the speed of float32 matrix products on this processor, by each of PyTorch's two libraries.

    python -m lab.products

The products are those of a language model of 135 million weights (SmolLM2's sizes), with as many rows as a decoding step
or a pass of scoring has. `cepo.models.cpu.matrix_products` chooses the library by the processor; this shows what the choice
rests on. One thread, and processor time, which other work on the machine does not increase.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cepo.hardware import processor_name
from cepo.models.cpu.matrix_products import by_onednn, prefers_onednn
from lab.support.profiling import GIGA
from lab.support.tables import table

ROWS = (64, 128, 1024)
LAYERS = {"attention": (576, 960), "feed-forward": (576, 3072), "head": (576, 49_152)}
RUNS = 7
SHORTEST_RUN_SECONDS = 0.05


def seconds_of(work: Callable[[], Any]) -> float:
    """Returns the processor seconds of one call of `work`: the least of several runs, each of many calls."""
    work()
    start = time.process_time()
    work()
    calls = 1 + int(SHORTEST_RUN_SECONDS / max(time.process_time() - start, 1e-6))
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(calls):
            work()
        best = min(best, (time.process_time() - start) / calls)
    return best


def speeds(rows: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Returns GFLOP/s of `(rows, inputs) @ (inputs, outputs)` by MKL and by oneDNN."""
    hidden = torch.randn(rows, inputs)
    weight = torch.randn(outputs, inputs)
    flops = 2 * rows * inputs * outputs

    def by_mkl() -> Tensor:
        return hidden @ weight.t()

    def by_other() -> Tensor:
        return by_onednn(hidden, weight)

    return flops / seconds_of(by_mkl) / GIGA, flops / seconds_of(by_other) / GIGA


def main() -> int:
    """Prints the table."""
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    with torch.inference_mode():
        for name, (inputs, outputs) in LAYERS.items():
            for rows in ROWS:
                mkl, onednn = speeds(rows, inputs, outputs)
                sizes = f"{rows} x {inputs} x {outputs}"
                lines.append([name, sizes, f"{mkl:.0f}", f"{onednn:.0f}", f"{onednn / mkl:.2f}"])
    library = "oneDNN" if prefers_onednn() else "MKL"
    print(f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}; cepo uses {library} for large products\n")
    print(table(["product", "sizes", "MKL, GFLOP/s", "oneDNN, GFLOP/s", "ratio"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
