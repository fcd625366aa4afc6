"""Qwen3-VL and its mixture of experts: M-RoPE, and features that enter behind the first decoder layers as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.models.families.base import EngineUse, experts_unserved
from cepo.models.families.grid import GridFamily

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


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

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """As every mixture of experts."""
        return experts_unserved(use)

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Experts are (experts, in, out) in published checkpoints and (experts, out, in) in transformers' model."""
        return name, weight.transpose(-1, -2) if name.endswith(_EXPERTS) else weight
