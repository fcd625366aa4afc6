"""The limits of the gaps between packed and padded rows, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from cepo.workers.passes import _allowed

NOISE = (0.01, 0.02, 0.03)
"""Mean, 99th percentile and maximum: gaps of at most 0.031 and 0.061 nats are allowed, whatever their maximum."""


@pytest.mark.parametrize(
    ("gaps", "allowed"),
    [
        ((0.0309, 0.0609, 9.0), True),
        ((0.0311, 0.0609, 0.0), False),
        ((0.0309, 0.0611, 0.0), False),
        ((float("nan"), 0.0, 0.0), False),
    ],
)
def test_in_16_bits_mean_and_percentile_have_limits(gaps: tuple[float, ...], allowed: bool) -> None:
    assert _allowed(torch.tensor(gaps), torch.tensor(NOISE)).item() is allowed


def test_a_mean_gap_above_a_fifth_is_refused_at_any_noise() -> None:
    assert _allowed(torch.tensor([0.19, 0.0, 0.0]), torch.ones(3)).item()
    assert not _allowed(torch.tensor([0.21, 0.0, 0.0]), torch.ones(3)).item()


def test_in_float32_the_largest_gap_has_a_limit() -> None:
    assert _allowed(torch.tensor([0.0, 0.0, 0.9e-4]), None).item()
    assert not _allowed(torch.tensor([0.0, 0.0, 1.1e-4]), None).item()
