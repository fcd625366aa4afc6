"""The packed attention by its formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_by_formula_to_mask(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Computes what the compiled attention computes, from the same mask."""
    place = torch.arange(query.shape[2], device=query.device)
    visible = mask.for_row(query.shape[2]).mask_mod(place, place, place[:, None], place[None])
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = (query.float() @ key.float().mT * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(dim=-1) @ value.float()).to(query.dtype)
