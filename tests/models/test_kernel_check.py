"""The comparison of a kernel with torch, here with functions of torch in the kernel's place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cepo.models.head import _kernel_works, _log_probs_by_torch, kernel_agrees

CPU = torch.device("cpu")


def failing(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("difference", "agrees"), [(0.0, True), (0.9e-4, True), (1.1e-4, False), (math.nan, False), (math.inf, False)]
)
@pytest.mark.parametrize("in_directions", [False, True])
def test_a_kernel_must_agree_in_log_probs_and_directions(
    difference: float, agrees: bool, in_directions: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The tolerance of float32 is 1e-4; a result that is no number differs, whichever of the results it is."""

    def inexact(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
        log_probs = _log_probs_by_torch(logits, targets, temperature, with_direction=with_direction)
        if in_directions:
            logits[1, 7] += difference
        else:
            log_probs[1] += difference
        return log_probs

    assert kernel_agrees(CPU, torch.float32, inexact) == agrees
    assert ("log-probs are computed by torch: the kernel differs by" in caplog.text) != agrees


def test_a_kernel_that_cannot_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert not kernel_agrees(CPU, torch.bfloat16, failing)
    assert "log-probs are computed by torch: the kernel fails (RuntimeError: no compiler)" in caplog.text


def test_a_processor_has_no_kernels() -> None:
    assert not _kernel_works(CPU, torch.float32)
    assert not _kernel_works(torch.device("cuda"), torch.float64)
