"""The comparison of a kernel with torch, here with functions of torch in the kernel's place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cepo.models.head import can_have_kernels, kernel_agrees

CPU = torch.device("cpu")


def sums(logits: Tensor, targets: Tensor) -> Sequence[Tensor]:
    return logits.double().sum(dim=1), targets.double()


def failing(logits: Tensor, targets: Tensor) -> Sequence[Tensor]:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("difference", "agrees"), [(0.0, True), (0.9e-4, True), (1.1e-4, False), (math.nan, False), (math.inf, False)]
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_must_agree_in_every_result(
    difference: float, agrees: bool, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The tolerance of float32 is 1e-4; a result that is no number differs, whichever of the results it is."""

    def other_sums(logits: Tensor, targets: Tensor) -> Sequence[Tensor]:
        results = list(sums(logits, targets))
        results[place] = results[place] + difference
        return results

    assert kernel_agrees(CPU, torch.float32, by_kernel=other_sums, by_torch=sums) == agrees
    assert ("log-probs are computed by torch: the kernel differs by" in caplog.text) != agrees


def test_a_kernel_that_cannot_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert not kernel_agrees(CPU, torch.bfloat16, by_kernel=failing, by_torch=sums)
    assert "log-probs are computed by torch: the kernel fails (RuntimeError: no compiler)" in caplog.text


def test_a_processor_has_no_kernels() -> None:
    assert not can_have_kernels(CPU, torch.float32)
    assert not can_have_kernels(torch.device("cuda"), torch.float64)
