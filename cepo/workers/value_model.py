"""From tokens to values: the body that scores, with one number for each position in place of a distribution."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cepo.workers.scoring_model import CollatedRows, PictureEncoder, response_states

HEAD_SCALE = 0.01
"""Standard deviation of an untrained value, for hidden states of unit size: the first values say next to nothing."""


class ValueModel(nn.Module):
    """The value before each response token. The root of the sharded model.

    `V_n = w . h_n + b` in float32, h_n the last hidden state before token n: the one that predicts it. `w` is drawn from
    `seed`, `b` starts at 0; both are kept in float32 whatever the body's type.

    `encoder` and `why_padded` are those of a `ScoringModel`.
    """

    def __init__(
        self, model: Any, *, seed: int, encoder: PictureEncoder | None = None, why_padded: str | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.encoder = encoder or PictureEncoder()
        self.why_padded = why_padded
        width = model.get_input_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, dtype=torch.float32)
        drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.head.weight.copy_(drawn * HEAD_SCALE / math.sqrt(width))
            self.head.bias.zero_()

    def forward(self, batch: CollatedRows) -> Float[Tensor, " N"]:
        """Values of all response tokens of the batch, row by row."""
        values = self.head(response_states(self.model, batch, self.encoder).float())
        return values.squeeze(1).clone()  # FSDP2 hooks into what its root returns, and warns of a view
