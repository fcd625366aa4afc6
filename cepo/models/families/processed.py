"""Supports InternVL, SmolVLM, LLaVA-OneVision and Gemma 3 by their own processor and `get_image_features`, padded.

Each placeholder is replaced by the tokens that the processor writes for it. All images of a prompt are one unit: they
are preprocessed and encoded together, as in a separate call of the processor and the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor

from cepo.errors import DataError
from cepo.models.inputs import (
    EncodeText,
    EngineUse,
    Family,
    ImageFeatures,
    ImageInputs,
    ImageReader,
    ImageSource,
    Video,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class ProcessedReader(ImageReader):
    """Reads images by the checkpoint's processor."""

    def __init__(
        self, family: ProcessedFamily, processor: Any, config: PreTrainedConfig, encode_text: EncodeText
    ) -> None:
        super().__init__(family, processor, config, encode_text)
        self._processor, self._tower_inputs = processor, family.tower_inputs
        self._placeholder: str = processor.tokenizer.convert_ids_to_tokens(self.placeholder_id)
        self._between: str = processor.tokenizer.eos_token
        self._tokens_of_size = lru_cache(maxsize=4096)(self._num_tokens)  # each count needs a call of the processor

    def read(
        self, images: Sequence[Image.Image], source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs:
        """Raises DataError if the processor refuses the images; see `ImageReader.read`."""
        assert not videos, "`video_factor` refuses them"
        text = self._between.join([self._placeholder] * len(images))
        try:
            values = self._processor(text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=False)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise DataError(f"the model's processor refuses images of {sizes} pixels ({error})") from error
        return ImageInputs(
            pixel_values=values["pixel_values"],
            more_tensors={name: values[name] for name in self._tower_inputs if name in values},
            expansions=self._parted(values["input_ids"][0].tolist()),
            source=source,
        )

    def num_tokens(self, size: tuple[int, int]) -> int:
        """See `ImageReader.num_tokens`. Each of several images in a prompt may have fewer tokens, but never more."""
        return self._tokens_of_size(size)

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        expansions = iter(images.expansions)
        expanded: list[int] = []
        for token in engine_ids:
            expanded += next(expansions) if token == self.placeholder_id else (token,)
        return expanded

    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        return torch.arange(len(token_ids)).expand(3, -1)

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        """Returns the only unit if its last placeholder is in [start, stop)."""
        last = max(index for index, token in enumerate(token_ids) if token == self.image_token_id)
        return [0] if start <= last < stop else []

    def smallest(self) -> tuple[tuple[int, ...], ImageInputs]:
        images = self.read([Image.new("RGB", (32, 32))])
        return images.expansions[0], images

    def _num_tokens(self, size: tuple[int, int]) -> int:
        return len(self.read([Image.new("RGB", size)]).expansions[0])

    def _parted(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        between = self._processor.tokenizer.eos_token_id
        ends = [-1, *(at for at, token in enumerate(token_ids) if token == between), len(token_ids)]
        return tuple(tuple(token_ids[start + 1 : end]) for start, end in pairwise(ends))


@dataclass(frozen=True, kw_only=True)
class ProcessedFamily(Family):
    """Implements families that use their own processor and forward pass, with padded rows.

    `tower_inputs` are the processor's outputs that the vision tower takes besides `pixel_values`. `siglip` towers have
    `vision_model` in their names in published checkpoints; transformers omits it.
    """

    tower_inputs: tuple[str, ...] = ()
    siglip: bool = False
    why_padded = "the family's own processor and forward pass require padded rows"
    image_reader: ClassVar[type[ImageReader]] = ProcessedReader

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        return {"pixel_values": images.pixel_values, **images.more_tensors}

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Encodes each prompt's images in a separate pass, so that none depends on another prompt's padding."""
        found: list[list[ImageFeatures]] = []
        for one in images:
            inputs = {name: tensor.to(device) for name, tensor in self.model_inputs(one).items()}
            embeddings = model.model.get_image_features(**inputs, return_dict=True).pooler_output
            if not isinstance(embeddings, Tensor):  # images differ in their number of tokens
                embeddings = torch.cat(list(embeddings))
            found.append([ImageFeatures(embeddings=embeddings)])
        return found

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

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, object]:
        """Returns the features as a list, which the model concatenates itself."""
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=[one.embeddings for one in features])}}


_JOINED_LINES = (("\n", "\n\n", "\n\n\n"), ("\n\n", "\n", "\n\n\n"), ("\n\n", "\n\n", "\n\n\n\n"))
"""Pairs of line-break tokens with the single token that the tokenizer produces for them within a text."""


class Gemma3Reader(ProcessedReader):
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
