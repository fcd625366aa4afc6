"""The published sizes of Qwen3-VL and of Qwen2.5-VL-3B, for tables and tests of the memory estimate."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from cepo.workers.memory import ModelShape

_TEXT = {
    "2B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
PUBLISHED_SIZES = ("2B", "3B", "4B", "8B")
"""Names of the dense models: Qwen2.5-VL-3B-Instruct, and Qwen3-VL-<name>-Instruct of the others."""


def published_config(size: str) -> PreTrainedConfig:
    """Returns the configuration of a dense model, with its published sizes; no file is read."""
    if size == "3B":
        return _qwen2_5_vl_3b()
    from transformers import Qwen3VLConfig

    tied = size != "8B"
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    text = {"vocab_size": 151936, **heads, "tie_word_embeddings": tied, **_TEXT[size]}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304}
    tower = _LARGE_TOWER if size == "8B" else _TOWER
    vision = {**tower, **patches, "num_heads": 16, "out_hidden_size": text["hidden_size"]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def _qwen2_5_vl_3b() -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 2048,
    }  # fmt: skip
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


@cache
def published_shape(size: str) -> ModelShape:
    from cepo.workers.memory import shape_of

    return shape_of(published_config(size))
