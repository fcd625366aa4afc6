"""Tables of examples that were worked out by hand: each has a name, its inputs, what is expected, and its arithmetic."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor


def examples(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def tensor(numbers: Any) -> Tensor:
    """Nested lists of numbers in float64; some are written as fractions, such as 2/3."""
    if isinstance(numbers, list):
        return torch.stack([tensor(number) for number in numbers])
    return torch.tensor(float(Fraction(numbers)), dtype=torch.float64)
