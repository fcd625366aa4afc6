"""SmolVLM, SmolVLM2 and Idefics3: an image is cut into rows and columns of tiles, whose places stand between them as tokens."""

from __future__ import annotations

from cepo.models.families.processed import ProcessedFamily


class SmolVLM(ProcessedFamily):
    """SmolVLM2 and Idefics3. Features stay in blocks of one tile each, (tiles, tokens of a tile, H), as the model merges them."""

    title = "SmolVLM2, Idefics3"
    model_types = ("smolvlm", "idefics3")
    tower_inputs = ("pixel_attention_mask",)
    vision_modules = ("vision_model", "connector")
