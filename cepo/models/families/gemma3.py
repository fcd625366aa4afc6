"""Supports Gemma 3, with bidirectional attention among an image's tokens and sliding windows in most layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from cepo.models.families.family import EncodeText, EngineUse, ImageReader
from cepo.models.families.processed import ProcessedFamily, ProcessedReader, with_tower_named
from cepo.models.inputs import ImageInputs

_JOINED_LINES = (("\n", "\n\n", "\n\n\n"), ("\n\n", "\n", "\n\n\n"), ("\n\n", "\n\n", "\n\n\n\n"))
"""Pairs of line-break tokens with the single token that the tokenizer produces for them within a text."""


class Gemma3Reader(ProcessedReader):
    """Reads Gemma 3's images. The empty lines around an image merge with adjacent line breaks into one token."""

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor, config, placeholder=processor.boi_token, tower_inputs=())
        vocabulary = processor.tokenizer.get_vocab()
        rules = [[vocabulary.get(text) for text in rule] for rule in _JOINED_LINES]
        self._rules = [(one, two, both) for one, two, both in rules if None not in (one, two, both)]

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """See `ImageReader.expand`. Adjacent line breaks are then merged, as by the tokenizer and vLLM in a text."""
        expanded = super().expand(engine_ids, images)
        for one, two, both in self._rules:
            joined: list[int] = []
            for token in expanded:
                if joined and (joined[-1], token) == (one, two):
                    joined[-1] = both  # type: ignore[assignment]
                else:
                    joined.append(token)
            expanded = joined
        return expanded


class Gemma3(ProcessedFamily):
    """Supports Gemma 3 with a vision tower."""

    title = "Gemma 3"
    model_types = ("gemma3",)
    vision_modules = ("vision_tower", "multi_modal_projector")

    def placeholder_text(self, processor: Any) -> str:
        return processor.boi_token

    def image_reader(self, processor: Any, config: Any, encode_text: EncodeText) -> ImageReader:
        return Gemma3Reader(processor, config)

    def placeholders(self, config: Any) -> tuple[int | None, int | None]:
        """Returns `<start_of_image>`, the placeholder of a whole image."""
        return config.boi_token_id, None

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """On a CPU, vLLM's attention is causal even among an image's tokens, which changes log-probs by 0.1 nats."""
        if use.on_gpu or not use.most_images:
            return None
        return "vLLM on a CPU masks later tokens of the same image, to which this model attends"

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        return with_tower_named(name), weight

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: Any) -> dict[str, Tensor]:
        """Returns which tokens belong to an image; the model builds its attention mask from them."""
        return {"token_type_ids": (input_ids == config.image_token_id).long()}
