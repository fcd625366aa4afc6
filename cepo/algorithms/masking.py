"""Makes the tensors of a `TokenBatch` from values by response, for every caller that has a method compute credit.

Only tensor methods are used, so torch is imported only for annotations: reading a configuration loads this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


def response_mask_of(lengths: Int64[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    """Returns True on the first `lengths[b]` tokens of row b; T is the largest length, at least 1."""
    num_positions = max(1, int(lengths.max()))
    positions = lengths.new_tensor(range(num_positions))
    return positions.unsqueeze(0) < lengths.unsqueeze(1)


def at_last_token(rewards: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Returns each row's outcome reward at the last token of its mask, 0 elsewhere. Each row has a token."""
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)  # argmax: the first True from the right
    token_rewards = rewards.new_zeros(mask.shape)
    return token_rewards.scatter_(1, last.unsqueeze(1), rewards.unsqueeze(1))


def with_rows(values: Float[Tensor, "B T"], rows: Mapping[int, Tensor]) -> Float[Tensor, "B T"]:
    """Returns `values` with those of some rows, (response length,), replaced; `values` itself if there are none.

    This is how log-probs of a teacher are made: a row that it did not score has the student's.
    """
    if not rows:
        return values
    result = values.clone()
    for row, row_values in rows.items():
        result[row, : len(row_values)] = row_values
    return result
