"""Qwen3-VL's dense models, with the sizes of their published configuration files; no file is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cepo.config.schema import LoraConfig
from cepo.sizing.memory import ModelShape
from cepo.sizing.needs import ShapeOf
from cepo.sizing.shape import shape_of

_TEXT = {
    "2B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SIZES = tuple(_TEXT)
"""Names of the models: Qwen3-VL-<name>-Instruct."""


@cache
def known_shape(size: str, lora: LoraConfig) -> ModelShape:
    """Returns the shape of Qwen3-VL-`size` with this adapter."""
    return shape_of(known_config(size), lora=lora)


def known_config(size: str) -> Any:
    """Returns the `Qwen3VLConfig` of a size."""
    from transformers import Qwen3VLConfig

    tied = size != "8B"
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    text = {"vocab_size": 151936, **heads, "tie_word_embeddings": tied, **_TEXT[size]}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304}
    tower = _LARGE_TOWER if size == "8B" else _TOWER
    vision = {**tower, **patches, "num_heads": 16, "out_hidden_size": text["hidden_size"]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def shapes_of(size: str) -> ShapeOf:
    """Returns a look-up, as `estimate_needs` takes it, that answers with one size for every model."""

    def shape_of_path(path: str, trust: bool, override: Mapping[str, Any], lora: LoraConfig) -> ModelShape:
        return known_shape(size, lora)

    return shape_of_path
