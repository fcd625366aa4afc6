"""Numbers of examples that were worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


def tensor(numbers: Any) -> Tensor:
    """Nested lists of numbers in float64; some are written as fractions, such as 2/3."""
    if isinstance(numbers, list):
        return torch.stack([tensor(number) for number in numbers])
    return torch.tensor(float(Fraction(numbers)), dtype=torch.float64)
