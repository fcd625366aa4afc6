"""Draws one token per row from its logits and its own uniform number, so that rows do not affect each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cepo.errors import EngineError
from cepo.rollout.generator import SamplingSettings


def row_uniforms(seed: int, sample: int, count: int) -> Float[Tensor, " T"]:
    """Returns the first `count` float64 numbers in [0, 1) of a sequence that depends only on (seed, sample)."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    # torch uses the low 32 bits of a CPU generator's seed.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") & 0xFFFFFFFF)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw_tokens(
    logits: Float[Tensor, "B V"],
    outputs: Sequence[Sequence[int]],
    uniforms: Float[Tensor, " B"],
    banned: Int64[Tensor, " N"],
    settings: SamplingSettings,
) -> Int64[Tensor, " B"]:
    """Draws the token at which the cumulative distribution, in token-id order, first exceeds the row's uniform number.

    With temperature 0 it is the likeliest allowed token. A token of probability 0 is never drawn. `outputs` are the
    tokens that each row's response already contains.

    Raises:
        EngineError: a logit is NaN.
    """
    if logits.isnan().any():
        raise EngineError(
            "the model's logits are not numbers (NaN); check its weights and the data type it computes in"
        )
    if settings.presence_penalty != 0:
        logits = logits.clone()
        for row, output in zip(logits, outputs, strict=True):
            row[torch.tensor(sorted(set(output)), dtype=torch.long, device=row.device)] -= settings.presence_penalty
    logits = _allowed(logits, banned, settings)
    if settings.temperature == 0:
        return logits.argmax(dim=1)
    cumulative = logits.softmax(dim=1, dtype=torch.float64).cumsum(dim=1)
    total = cumulative[:, -1]
    # Below the total even if the product rounds up, so that a token of positive probability is always found.
    points = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]


def _allowed(logits: Tensor, banned: Tensor, settings: SamplingSettings) -> Tensor:
    """Divides the logits by a temperature above 0, and sets those of tokens that may not be drawn to -inf.

    Excludes first the banned tokens, then all but the `top_k` likeliest, and then all but the likeliest tokens that
    together reach the probability `top_p`. The likeliest token that is not banned always remains.
    """
    logits = logits.index_fill(1, banned, float("-inf"))
    if settings.temperature == 0:
        return logits
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[1]:
        threshold = logits.topk(settings.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if settings.top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True)
        probabilities = ordered.softmax(dim=1, dtype=torch.float64)
        behind: Bool[Tensor, "B V"] = probabilities.cumsum(dim=1) - probabilities >= settings.top_p
        behind[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(behind).scatter(1, order, behind), float("-inf"))
    return logits
