"""Profiles a stage: the time of its operations, and the speed of its matrix products.

The speed is compared with that of a single product of the layer's sizes on the same device in the same process. A stage
near that speed is bound by arithmetic, and only fewer tokens make it faster.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.support.tables import table

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.flop_counter import FlopCounterMode

    from testing.shapes import Shape

IN_PLACE = "aten::addmm_"
"""The operation by which adapters add their product, whose work torch does not count by itself."""
BY_ONEDNN = "mkldnn::_linear_pointwise"
"""The operation of `cepo.models.cpu.matrix_products`, whose work torch does not count by itself either."""
MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", IN_PLACE, BY_ONEDNN, "aten::bmm", "aten::baddbmm")
"""The operations of linear layers; fused attention is a separate operation."""
LISTED_OPERATIONS = 12
PRODUCT_RUNS = 7
GIGA = 1e9


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter of matrix products, extended to those in place and by oneDNN."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    formulas = {
        torch.ops.aten.addmm_: _in_place_flops,
        torch.ops.mkldnn._linear_pointwise: _onednn_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def profiled(work: Callable[[], Any], *, device: str) -> dict[str, Any]:
    """Runs `work` once under torch's profiler.

    Seconds are an operation's own, without those of the operations that it calls; on a GPU they are those of its
    kernels. On a CPU the profiler has wall times. With one thread, these are multiplied by the ratio of processor time
    to wall time, so that other work on the machine does not increase them.

    Returns:
        operations: the `LISTED_OPERATIONS` that take longest, each with operation, seconds, share (of all operations'
            seconds) and calls.
        matrix_products: all of `MATRIX_PRODUCTS` together: seconds, share, flops (computed from their shapes; a
            multiply-add counts as 2) and gflops_per_second.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, with_flops=True, record_shapes=True) as run:
        wall, process = time.perf_counter(), time.process_time()
        work()
        _wait(device)
        wall, process = time.perf_counter() - wall, time.process_time() - process
    computed = process / wall if not on_gpu and torch.get_num_threads() == 1 else 1.0
    # A kernel's seconds are part of the operation that started it, and also of a separate entry.
    found = [event for event in run.key_averages() if event.device_type == DeviceType.CPU]
    seconds = {
        event.key: computed * (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        for event in found
    }
    whole = sum(seconds.values())
    most = sorted(found, key=lambda event: seconds[event.key], reverse=True)[:LISTED_OPERATIONS]
    product_seconds = sum(seconds.get(key, 0.0) for key in MATRIX_PRODUCTS)
    flops = sum(map(_product_flops, run.key_averages(group_by_input_shape=True)))
    return {
        "operations": [
            {
                "operation": event.key,
                "seconds": seconds[event.key],
                "share": seconds[event.key] / whole,
                "calls": event.count,
            }
            for event in most
        ],
        "matrix_products": {
            "seconds": product_seconds,
            "share": product_seconds / whole,
            "flops": flops,
            "gflops_per_second": flops / product_seconds / GIGA,
        },
    }


def product_speed(
    shape: Shape, tokens: int, *, device: str, dtype: str, compute: Callable[[Tensor, Tensor], Tensor] | None = None
) -> dict[str, Any]:
    """Measures the product of `tokens` tokens with a matrix of the feed-forward layer: the median of `PRODUCT_RUNS`.

    `compute` is by default that of the package's linear layers. A first run is not counted. Seconds are as in `profiled`.
    """
    import torch

    from cepo.models.cpu.matrix_products import linear

    compute = compute or linear
    draw = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    states = torch.randn((tokens, shape.hidden), generator=draw, device=device, dtype=kind)
    weight = torch.randn((shape.intermediate, shape.hidden), generator=draw, device=device, dtype=kind)
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[float] = []
    for _ in range(PRODUCT_RUNS + 1):
        _wait(device)
        start = clock()
        compute(states, weight)
        _wait(device)
        seconds.append(clock() - start)
    middle = statistics.median(seconds[1:])
    flops = 2 * tokens * shape.hidden * shape.intermediate
    return {
        "sizes": [tokens, shape.hidden, shape.intermediate],
        "dtype": dtype,
        "seconds": middle,
        "gflops_per_second": flops / middle / GIGA,
    }


def profile_stages(
    works: dict[str, tuple[Callable[[], Any], int]], shape: Shape, *, device: str, dtype: str
) -> dict[str, Any]:
    """Profiles stages for a record.

    Args:
        works: for each stage its work, and the tokens that this computes.

    Returns:
        profile: for each stage the operations of `profiled`.
        matrix_products: for each stage those of `profiled` and, under large_product, the `product_speed` of its tokens.
    """
    record: dict[str, Any] = {"profile": {}, "matrix_products": {}}
    for name, (work, tokens) in works.items():
        found = profiled(work, device=device)
        record["profile"][name] = found["operations"]
        large = {"large_product": product_speed(shape, tokens, device=device, dtype=dtype)}
        record["matrix_products"][name] = found["matrix_products"] | large
    return record


def profile_tables(record: dict[str, Any]) -> list[str]:
    """Formats a Markdown table of each stage's operations, and one of the matrix products of all stages."""
    tables = [
        table(
            [f"{name}: operation", "own seconds", "share", "calls"],
            [
                [each["operation"], f"{each['seconds']:.4f}", f"{each['share']:.1%}", f"{each['calls']:,}"]
                for each in operations
            ],
        )
        for name, operations in record["profile"].items()
    ]
    rows: list[list[str]] = []
    for name, found in record["matrix_products"].items():
        large = found["large_product"]
        speed, reached = found["gflops_per_second"], large["gflops_per_second"]
        sizes = " x ".join(map(str, large["sizes"]))
        row = [name, f"{found['share']:.1%}", f"{found['flops'] / GIGA:,.1f}", f"{speed:,.1f}"]
        rows.append([*row, f"{reached:,.1f}", f"{speed / reached:.2f}", f"{sizes}, {large['dtype']}"])
    head = [
        "matrix products of",
        "share of seconds",
        "GFLOP",
        "GFLOP/s",
        "one large product, GFLOP/s",
        "ratio",
        "its sizes",
    ]
    return [*tables, table(head, rows)]


def _in_place_flops(added_to: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    assert list(added_to) == [left[0], right[1]]
    return 2 * left[0] * left[1] * right[1]


def _onednn_flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(hidden) * weight[0]


def _product_flops(event: Any) -> int:
    """Returns the operations of all calls of one operation with the same shapes."""
    if event.key == IN_PLACE:
        return event.count * _in_place_flops(*event.input_shapes[:3])
    if event.key == BY_ONEDNN:
        return event.count * _onednn_flops(*event.input_shapes[:2])
    return event.flops if event.key in MATRIX_PRODUCTS else 0


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
