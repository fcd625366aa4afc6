"""Counts, for each response, the tokens whose weight is clipped, as the training metrics count them over a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepo.algorithms import statistics
from cepo.types import TokenSignal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClipRates:
    """Shares of a response's tokens with an advantage, as `evidence/clip_low_rate` and `evidence/clip_high_rate`."""

    lower: float  # whose weight the lower bound, 1 - r, clips
    upper: float  # whose weight the upper bound, 1 + r, clips
    tokens: int  # number of tokens with an advantage


def clip_rates(signal: TokenSignal, response_mask: Tensor) -> dict[int, ClipRates]:
    """Returns the rates of a method's responses, by row of `response_mask` (B, T).

    A response without any token with an advantage has none, and so have all those of a method that clips no weights.
    """
    clipping = signal.diagnostics.get("clipping")  # (B, T)
    if clipping is None:
        return {}
    counted = response_mask & (statistics.advantage_sign(signal.advantages) != 0)
    lower = statistics.response_means((clipping < 0).float(), counted)  # (B,)
    upper = statistics.response_means((clipping > 0).float(), counted)  # (B,)
    rates: dict[int, ClipRates] = {}
    for row, num_tokens in enumerate(counted.sum(dim=1).tolist()):
        if num_tokens:
            rates[row] = ClipRates(lower=float(lower[row]), upper=float(upper[row]), tokens=num_tokens)
    return rates
