"""Supports InternVL 2.5 and 3 in the transformers format (checkpoints whose names end in -hf)."""

from __future__ import annotations

from cepo.models.families.processed import ProcessedFamily


class InternVL(ProcessedFamily):
    """Supports InternVL3, which cuts a large image into tiles of equally many tokens between `<img>` and `</img>`."""

    title = "InternVL3"
    model_types = ("internvl",)
    vision_modules = ("vision_tower", "multi_modal_projector")
