"""Supports LLaVA-OneVision, which tiles an image in its own aspect ratio and ends each row with a learnt vector."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cepo.models.families.family import EngineUse, ImageFeatures
from cepo.models.families.processed import ProcessedFamily, with_tower_named


class LlavaOneVision(ProcessedFamily):
    """Supports LLaVA-OneVision. Only a prompt's sole image is tiled; `batch_num_images` tells the model."""

    title = "LLaVA-OneVision"
    model_types = ("llava_onevision",)
    tower_inputs = ("image_sizes", "batch_num_images")
    vision_modules = ("vision_tower", "multi_modal_projector")
    vision_parameters = ("image_newline",)

    def joined(self, embeddings: Any) -> Tensor:
        """Concatenates the images' features to (image tokens, H), because images differ in their number of tokens."""
        return torch.cat(list(embeddings))

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """vLLM serves no adapters for this architecture, and tiles images even if a prompt has several."""
        if use.with_adapter:
            return "vLLM serves no LoRA adapters on LLaVA-OneVision"
        if use.most_images > 1:
            return "vLLM cuts each of several images into tiles, but the model's own processor cuts none of them"
        return None

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        return with_tower_named(name), weight

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, Any]:
        """Returns the features as a list, which the model concatenates itself."""
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=[one.embeddings for one in features])}}
