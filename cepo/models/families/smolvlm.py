"""Supports SmolVLM, SmolVLM2 and Idefics3, which cut an image into a grid of tiles separated by position tokens."""

from __future__ import annotations

from cepo.models.families.processed import ProcessedFamily


class SmolVLM(ProcessedFamily):
    """Supports SmolVLM2 and Idefics3. Features are (tiles, tokens per tile, H), which the model merges."""

    title = "SmolVLM2, Idefics3"
    model_types = ("smolvlm", "idefics3")
    tower_inputs = ("pixel_attention_mask",)
    vision_modules = ("vision_model", "connector")
