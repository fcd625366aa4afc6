"""Log-probs of a large vocabulary beside float64, and on a GPU the time of the kernel beside that of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_places import Place
from torch.utils.benchmark import Timer

from cepo.models.head import _kernel_works, _log_probs_by_torch, log_probs_in_place

ROWS = {"cpu": (16, 4096), "cuda": (220, 151_936)}
"""A chunk of tokens and a vocabulary."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_log_probs_and_gradients_are_those_of_float64(place: Place, dtype: torch.dtype, figure: Any) -> None:
    rows, vocabulary = ROWS[place.device]
    logits = (4 * torch.randn(rows, vocabulary, device=place.device)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), device=place.device)
    expected = logits.double().div(0.7).log_softmax(dim=1)
    found = log_probs_in_place(logits, targets, 0.7, with_direction=True)
    gap = float((found - expected.gather(1, targets[:, None])[:, 0]).abs().max())
    direction = torch.zeros_like(expected).scatter_(1, targets[:, None], 1.0) - expected.exp()
    figure(f"head, {dtype}: largest gap in nats", gap)
    assert gap < 1e-4
    assert float((logits.double() - direction).abs().max()) < (1e-5 if dtype is torch.float32 else 2**-8)


def test_the_kernel_is_in_use_on_a_gpu(place: Place, figure: Any) -> None:
    if place.device == "cpu":
        assert not _kernel_works(torch.device("cpu"), torch.bfloat16), "Triton has no kernels for processors"
        return
    device = torch.device("cuda", torch.cuda.current_device())
    rows, vocabulary = ROWS["cuda"]
    logits = torch.randn(rows, vocabulary, device=device)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    assert _kernel_works(logits.device, logits.dtype), "see the log for why not"
    for with_direction in (False, True):
        for name, compute in (("kernel", log_probs_in_place), ("torch", _log_probs_by_torch)):
            timed = "compute(logits, targets, 1.0, with_direction=with_direction)"
            names = {"compute": compute, "logits": logits, "targets": targets, "with_direction": with_direction}
            milliseconds = 1000 * Timer(timed, globals=names).blocked_autorange().median
            kind = "with gradient" if with_direction else "without gradient"
            figure(f"head, {name}, {kind}, {rows} tokens: median ms", milliseconds)
