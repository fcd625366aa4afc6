"""Lets the host queue a pass without waiting for the device: copies that do not block, and models that do not count.

A mask as an index counts its entries before anything else can be queued, and so does a check of their number. What models
of transformers compute in this way is replaced. The values are the same bits. Without gradient to the image features, as
with a frozen vision tower, no wait is left.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on the device.

    A GPU copies it from page-locked memory while the host goes on. From other memory the host would wait for all work
    that is queued before the copy. torch reuses the page-locked memory once the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def use_masks_without_counting(model: Any) -> None:
    """Replaces, where the model has them, the sum of image features onto masked tokens and the checked placeholders."""
    decoder = model.get_decoder()
    if hasattr(decoder, "_deepstack_process"):  # only Qwen3-VL
        decoder._deepstack_process = _with_features_added
        model.model.get_placeholder_mask = MethodType(_placeholder_masks, model.model)


def _with_features_added(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Returns `hidden` (R, L, H) with `features` (N, H) added where `places` (R, L) is True, row by row."""
    chosen = places.to(hidden.device).unsqueeze(-1).expand_as(hidden)
    added = torch.zeros_like(hidden).masked_scatter(chosen, features.to(hidden.device, hidden.dtype))
    return hidden + added


def _placeholder_masks(
    body: Any,
    input_ids: Tensor,
    inputs_embeds: Tensor,
    image_features: Tensor | None = None,
    video_features: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns where placeholders of images and videos are, (R, L, 1).

    That their numbers are those of the features is not checked here, since counting would wait: the processor makes both,
    and sampled placeholders are banned.
    """
    masks = (input_ids == token for token in (body.config.image_token_id, body.config.video_token_id))
    image_mask, video_mask = (mask.unsqueeze(-1) for mask in masks)
    return image_mask, video_mask
