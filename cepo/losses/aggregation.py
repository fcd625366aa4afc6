"""Weights token losses in the loss of an optimizer batch.

The aggregation does not depend on micro-batches, padding, packing or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

AGGREGATIONS = ("token", "seq", "seq_sum", "constant")


@dataclass(frozen=True)
class LossDenominators:
    """The totals by which losses are divided: of the optimizer batch on all ranks, including rows without gradient."""

    num_tokens: int
    num_sequences: int
    max_response_length: int


def token_weights(
    response_mask: Bool[Tensor, "B T"], aggregation: str, denominators: LossDenominators
) -> Float[Tensor, "B T"]:
    """Returns the token weights of the aggregated loss, `sum(token_loss * weights)` over all micro-batches and ranks.

    `token`: 1 / num_tokens. `seq`: 1 / (num_sequences * length_i), the paper's formula. `seq_sum`: 1 / num_sequences.
    `constant`: 1 / (num_sequences * max_response_length) (Dr. GRPO). Padding has weight exactly 0.
    """
    mask = response_mask.float()
    if aggregation == "token":
        return mask / denominators.num_tokens
    if aggregation == "seq":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        return mask / lengths / denominators.num_sequences
    if aggregation == "seq_sum":
        return mask / denominators.num_sequences
    assert aggregation == "constant", aggregation
    return mask / (denominators.num_sequences * denominators.max_response_length)
