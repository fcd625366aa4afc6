"""Supports Qwen3.5's vision models, in which three of four layers are recurrent."""

from __future__ import annotations

from cepo.models.families.family import EngineUse, experts_unserved
from cepo.models.families.grid import GridFamily


class Qwen35(GridFamily):
    """Supports Qwen3.5."""

    title = "Qwen3.5"
    model_types = ("qwen3_5",)
    packs = False
    why_padded = (
        "linear-attention layers carry a state from token to token, which the branches of a packed row cannot share"
    )

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """vLLM's CPU build has a linear-attention kernel only for bf16."""
        if use.on_gpu:
            return None
        if use.dtype != "bf16":
            return f"vLLM computes linear attention on a CPU only in bf16, but worker.rollout.dtype is {use.dtype}"
        return None


class Qwen35Moe(Qwen35):
    """Supports Qwen3.5 with a mixture of experts. LoRA adapts attention and the expert that all tokens share."""

    title = "Qwen3.5-MoE"
    model_types = ("qwen3_5_moe",)

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """Returns the reason that holds for dense models, else the one for every mixture of experts."""
        return super().why_not_vllm(use) or experts_unserved(use)
