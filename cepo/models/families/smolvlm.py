"""SmolVLM, SmolVLM2 and Idefics3, which cut an image into rows and columns of tiles with position tokens between them."""

from __future__ import annotations

from cepo.models.families.processed import ProcessedFamily


class SmolVLM(ProcessedFamily):
    """SmolVLM2 and Idefics3. Features are blocks of one tile each, (tiles, tokens of a tile, H), which the model merges."""

    title = "SmolVLM2, Idefics3"
    model_types = ("smolvlm", "idefics3")
    tower_inputs = ("pixel_attention_mask",)
    vision_modules = ("vision_model", "connector")
