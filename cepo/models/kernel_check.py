"""Compares a Triton kernel with torch before its first use on a device, which decides which of them computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KERNEL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""The largest accepted difference between kernel and torch at the first use on a device, for each supported type. The
relative error of a GPU's exponential and logarithm is 2e-7, which is about 1e-5 for log-probs of -20."""

Compute = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Computes results from logits (3, 5000), which it may overwrite, and targets (3,)."""


def can_have_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a kernel may be tried: on a GPU, with Triton, for a type with a tolerance."""
    return device.type == "cuda" and dtype in KERNEL_TOLERANCE and find_spec("triton") is not None


def kernel_agrees(
    what: str, device: torch.device, dtype: torch.dtype, *, by_kernel: Compute, by_torch: Compute
) -> bool:
    """Returns whether a kernel computes what torch does from small logits of a type on a device.

    If not, or if the kernel fails, a warning says that `what` are computed by torch.
    """
    angles = torch.linspace(-9.0, 9.0, 3 * 5000, device=device).view(3, 5000)
    logits = angles.sin_().mul_(8.0).to(dtype)
    targets = torch.tensor([0, 4999, 77], device=device)
    expected_results = by_torch(logits.clone(), targets)
    try:
        results = by_kernel(logits, targets)
    except (RuntimeError, ImportError, OSError) as error:  # no compiler, or a kernel this device cannot run
        logger.warning("%s are computed by torch: the kernel fails (%s: %s)", what, type(error).__name__, error)
        return False
    for result, expected in zip(results, expected_results, strict=True):
        gap = float((result - expected).abs().max())
        if not gap <= KERNEL_TOLERANCE[dtype]:  # a gap that is no number is none that is small
            logger.warning("%s are computed by torch: the kernel differs by %.1e in %s", what, gap, dtype)
            return False
    return True
