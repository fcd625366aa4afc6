"""Qwen3-VL and its mixture of experts: M-RoPE, and image features that are also added after the first decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.models.families.base import EngineUse, experts_unserved
from cepo.models.families.grid import GridFamily

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


class Qwen3VL(GridFamily):
    """Qwen3-VL; each frame of a video follows its time as text."""

    title = "Qwen3-VL"
    model_types = ("qwen3_vl",)
    reads_videos = True
    fused_decoding = True


class Qwen3VLMoe(GridFamily):
    """Qwen3-VL with a mixture of experts. The experts are not linear layers, so LoRA adapts only attention."""

    title = "Qwen3-VL-MoE"
    model_types = ("qwen3_vl_moe",)
    reads_videos = True

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """See `experts_unserved`."""
        return experts_unserved(use)

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Transposes experts from (experts, out, in) in transformers' model to (experts, in, out) in published checkpoints."""
        return name, weight.transpose(-1, -2) if name.endswith(_EXPERTS) else weight
