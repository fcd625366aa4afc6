"""LLaVA-OneVision: tiles at the image's own aspect ratio, with a learnt vector behind each row of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cepo.models.families.base import ImageFeatures
from cepo.models.families.processed import ProcessedFamily

if TYPE_CHECKING:
    from torch import Tensor


class LlavaOneVision(ProcessedFamily):
    """LLaVA-OneVision. An image is cut into tiles only if it is alone in its prompt, as `batch_num_images` tells the model."""

    title = "LLaVA-OneVision"
    model_types = ("llava_onevision",)
    tower_inputs = ("image_sizes", "batch_num_images")
    vision_modules = ("vision_tower", "multi_modal_projector")
    vision_parameters = ("image_newline",)

    def joined(self, embeddings: Any) -> Tensor:
        """(image tokens, H) of all images: each has its own number of tokens."""
        import torch

        return torch.cat(list(embeddings))

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, Any]:
        """The model joins a list itself."""
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=[one.embeddings for one in features])}}
