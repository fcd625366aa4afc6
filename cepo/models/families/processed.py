"""Supports InternVL, SmolVLM, LLaVA-OneVision and Gemma 3: all images of a prompt are encoded together, in padded rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from cepo.models.inputs import EngineUse, Family, ImageFeatures, ImageInputs, ImageReader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class ProcessedFamily(Family):
    """`siglip` towers have `vision_model` in their names in published checkpoints; transformers omits it."""

    siglip: bool = False
    why_padded = "the family's own processor and forward pass require padded rows"

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        if self.siglip:
            name = re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", name)
        return name, weight


class LlavaOneVision(ProcessedFamily):
    """Supports LLaVA-OneVision. Only a prompt's sole image is tiled; `batch_num_images` tells the model."""

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """vLLM serves no adapters for this architecture, and tiles images even if a prompt has several."""
        if use.with_adapter:
            return "vLLM serves no LoRA adapters on LLaVA-OneVision"
        if use.most_images > 1:
            return "vLLM cuts each of several images into tiles, but the model's own processor cuts none of them"
        return None

    def feature_inputs(self, features: Sequence[ImageFeatures]) -> dict[str, object]:
        """Returns the features as a list, which the model concatenates itself."""
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=[one.embeddings for one in features])}}


_JOINED_LINES = (("\n", "\n\n", "\n\n\n"), ("\n\n", "\n", "\n\n\n"), ("\n\n", "\n\n", "\n\n\n\n"))
"""Pairs of line-break tokens with the single token that the tokenizer produces for them within a text."""


class Gemma3Reader(ImageReader):
    """Reads Gemma 3's images. The empty lines around an image merge with adjacent line breaks into one token."""

    @cached_property
    def _rules(self) -> list[list[int]]:
        vocabulary = self._processor.tokenizer.get_vocab()
        return [[vocabulary[text] for text in rule] for rule in _JOINED_LINES if vocabulary.keys() >= set(rule)]

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """See `ImageReader.expand`. Adjacent line breaks are then merged, as by the tokenizer and vLLM in a text."""
        expanded = super().expand(engine_ids, images)
        for one, two, both in self._rules:
            joined: list[int] = []
            for token in expanded:
                if joined and (joined[-1], token) == (one, two):
                    joined[-1] = both
                else:
                    joined.append(token)
            expanded = joined
        return expanded


class Gemma3(ProcessedFamily):
    image_reader = Gemma3Reader

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """On a CPU, vLLM's attention is causal even among an image's tokens, which changes log-probs by 0.1 nats."""
        if use.on_gpu or not use.most_images:
            return None
        return "vLLM on a CPU masks later tokens of the same image, to which this model attends"

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: PreTrainedConfig) -> dict[str, Tensor]:
        """Returns which tokens belong to an image; the model builds its attention mask from them."""
        return {"token_type_ids": (input_ids == config.image_token_id).long()}
