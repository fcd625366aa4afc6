"""Supports text models whose logits are a plain LM head on the last hidden state."""

from __future__ import annotations

from cepo.models.families.family import EngineUse, Family, experts_unserved


class Qwen3(Family):
    """Supports Qwen3."""

    title = "Qwen3"
    model_types = ("qwen3",)
    fused_decoding = True


class TextModel(Family):
    """Supports causal language models of transformers that do not scale or cap their logits."""

    title = "Qwen2, Qwen2.5, Llama, Mistral, SmolLM3, OLMo 2, Phi-3"
    model_types = ("qwen2", "llama", "mistral", "smollm3", "olmo2", "phi3")


class TextMoe(Family):
    """Supports text models with a mixture of experts. Experts are not linear layers, so LoRA adapts only attention."""

    title = "Qwen2-MoE, Qwen3-MoE"
    model_types = ("qwen2_moe", "qwen3_moe")

    def why_not_vllm(self, use: EngineUse) -> str | None:
        return experts_unserved(use)
