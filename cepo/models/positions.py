"""Computes position ids: three axes (time, height, width) for models with M-RoPE, one axis for text models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from cepo.models.inputs import ImageInputs


def context_positions(
    token_ids: Sequence[int],
    images: ImageInputs,
    *,
    image_token_id: int,
    merge_size: int,
    video_token_id: int | None = None,
) -> Int64[Tensor, "3 L"]:
    """Returns the M-RoPE positions of a context by Qwen3-VL's rule.

    Text advances all three axes by one per token. An image of (h, w) merged patches that starts at position p has time
    p, height p + row and width p + column. The text after it continues at p + max(h, w). Each temporal patch of a video
    is such an image, preceded by its time as text.
    """
    grids = images.grid.tolist()
    remaining = {image_token_id: iter(grids[: images.num_images])}
    if video_token_id is not None:
        remaining[video_token_id] = iter(grids[images.num_images :])
    pieces: list[Tensor] = []
    position = index = 0
    while index < len(token_ids):
        if token_ids[index] in remaining:
            time, height, width = next(remaining[token_ids[index]])
            height, width = height // merge_size, width // merge_size
            axes = torch.meshgrid(
                torch.zeros(time, dtype=torch.long), torch.arange(height), torch.arange(width), indexing="ij"
            )
            pieces.append(torch.stack([axis.reshape(-1) for axis in axes]) + position)
            index += time * height * width
            position += max(height, width)
            continue
        end = index
        while end < len(token_ids) and token_ids[end] not in remaining:
            end += 1
        pieces.append(torch.arange(position, position + end - index).expand(3, -1))
        position += end - index
        index = end
    return torch.cat(pieces, dim=1)


def sequence_positions(context: Int64[Tensor, "3 C"], num_response_tokens: int) -> Int64[Tensor, "3 L"]:
    """Appends the response's positions, which continue after the context's largest position on all axes."""
    start = int(context.max()) + 1
    return torch.cat([context, torch.arange(start, start + num_response_tokens).expand(3, -1)], dim=1)
