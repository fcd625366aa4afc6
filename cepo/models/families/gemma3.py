"""Gemma 3: tokens of an image see each other in both directions, and most layers see a window of the past alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cepo.models.families.base import EncodeText, EngineUse, ImageReader
from cepo.models.families.processed import ProcessedFamily, ProcessedReader, with_tower_named
from cepo.models.inputs import ImageInputs

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor

_JOINED_LINES = (("\n", "\n\n", "\n\n\n"), ("\n\n", "\n", "\n\n\n"), ("\n\n", "\n\n", "\n\n\n\n"))
"""Two tokens that would be one, had the text been tokenised whole."""


class Gemma3Reader(ProcessedReader):
    """An image begins and ends with an empty line, which joins with line breaks beside it into one token."""

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor, config, placeholder=processor.boi_token, tower_inputs=())
        vocabulary = processor.tokenizer.get_vocab()
        rules = [[vocabulary.get(text) for text in rule] for rule in _JOINED_LINES]
        self._rules = [(one, two, both) for one, two, both in rules if None not in (one, two, both)]

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """See `ImageReader.expand`; then line breaks are joined as in a text tokenised whole, and as vLLM does it."""
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
    """Gemma 3 with a vision tower."""

    title = "Gemma 3"
    model_types = ("gemma3",)
    vision_modules = ("vision_tower", "multi_modal_projector")

    def placeholder_text(self, processor: Any) -> str:
        """`<start_of_image>`."""
        return processor.boi_token

    def reader(self, processor: Any, config: Any, encode_text: EncodeText) -> ImageReader | None:
        """None where the folder has no image processor: it then reads text alone."""
        return None if getattr(processor, "image_processor", None) is None else Gemma3Reader(processor, config)

    def placeholders(self, config: Any) -> tuple[int | None, int | None]:
        """`<start_of_image>` stands for a whole image."""
        return config.boi_token_id, None

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """Its attention on a CPU is causal among an image's tokens too: log-probs of prompts with images differ by 0.1 nats."""
        if use.on_gpu or not use.most_images:
            return None
        return "vLLM on a CPU lets no token of an image see a later one, which this model was trained to do"

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """See `with_tower_named`."""
        return with_tower_named(name), weight

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: Any) -> dict[str, Tensor]:
        """Which tokens are an image's: the attention mask is made of them."""
        return {"token_type_ids": (input_ids == config.image_token_id).long()}
