"""Supports Qwen3-VL and its mixture of experts, with M-RoPE and image features added after the first decoder layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cepo.models.families.family import EngineUse, experts_unserved
from cepo.models.families.grid import GridFamily

_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_TEXT = {
    "2B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
PUBLISHED_SIZES = tuple(_TEXT)
"""Names of the dense models: Qwen3-VL-<name>-Instruct."""


class Qwen3VL(GridFamily):
    """Supports Qwen3-VL. Each frame of a video is preceded by its time as text."""

    title = "Qwen3-VL"
    model_types = ("qwen3_vl",)
    reads_videos = True
    fused_decoding = True


class Qwen3VLMoe(GridFamily):
    """Supports Qwen3-VL with a mixture of experts. The experts are not linear layers, so LoRA adapts only attention."""

    title = "Qwen3-VL-MoE"
    model_types = ("qwen3_vl_moe",)
    reads_videos = True

    def why_not_vllm(self, use: EngineUse) -> str | None:
        return experts_unserved(use)

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Transposes experts from transformers' (experts, out, in) to published checkpoints' (experts, in, out)."""
        return name, weight.transpose(-1, -2) if name.endswith(_EXPERTS) else weight


def published_config(size: str) -> Any:
    """Returns the configuration of a dense model, with its published sizes; no file is read."""
    from transformers import Qwen3VLConfig

    tied = size != "8B"
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    text = {"vocab_size": 151936, **heads, "tie_word_embeddings": tied, **_TEXT[size]}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304}
    tower = _LARGE_TOWER if size == "8B" else _TOWER
    vision = {**tower, **patches, "num_heads": 16, "out_hidden_size": text["hidden_size"]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
