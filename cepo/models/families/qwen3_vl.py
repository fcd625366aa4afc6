"""Qwen3-VL and its mixture of experts: M-RoPE, and features that enter behind the first decoder layers as well."""

from __future__ import annotations

from cepo.models.families.grid import GridFamily


class Qwen3VL(GridFamily):
    """Qwen3-VL; a video's frames stand behind their times as text."""

    title = "Qwen3-VL"
    model_types = ("qwen3_vl",)
    reads_videos = True
    fused_decoding = True


class Qwen3VLMoe(GridFamily):
    """Qwen3-VL with a mixture of experts, whose weights are no linear layers: LoRA adapts attention alone."""

    title = "Qwen3-VL-MoE"
    model_types = ("qwen3_vl_moe",)
    reads_videos = True
