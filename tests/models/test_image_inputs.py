"""What makes two prompts' images the same: their content in every tensor, its name and its shape."""

from __future__ import annotations

import dataclasses

import torch

from cepo.models.interface import ImageInputs


def test_a_key_tells_shapes_names_and_content_apart() -> None:
    """Images of 2 x 6 and of 6 x 2 patches can have equal bytes, and must not share their features."""
    numbers = torch.arange(12, dtype=torch.float32)
    wide = ImageInputs(tensors={"pixel_values": numbers.view(2, 6)})
    same = dataclasses.replace(wide, tensors={"pixel_values": numbers.clone().view(2, 6)})
    assert wide.content_key == same.content_key
    different_tensors = [
        {"pixel_values": numbers.view(6, 2)},
        {"pixel_values": numbers.view(1, 2, 6)},
        {"pixel_values_videos": numbers.view(2, 6)},
        {"pixel_values": numbers.view(2, 6) + 1},
    ]
    keys = {wide.content_key, *(ImageInputs(tensors=tensors).content_key for tensors in different_tensors)}
    assert len(keys) == 5
    longer = ImageInputs(tensors=wide.tensors, expansions={1: [(2, 2)]})
    assert longer.content_key not in keys
