"""Log-probs of a large vocabulary beside float64, and where the kernel computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_places import Place

from cepo.models.head import _kernel_works, log_probs_in_place

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
    assert figure(f"head, {dtype}: largest gap in nats", gap) < 1e-4
    assert float((logits.double() - direction).abs().max()) < (1e-5 if dtype is torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_is_in_use_on_a_gpu(place: Place, dtype: torch.dtype) -> None:
    """Triton has no kernels for processors. The log has the reason where a GPU's kernel is not used."""
    assert _kernel_works(torch.zeros(1, device=place.device).device, dtype) == (place.device == "cuda")
