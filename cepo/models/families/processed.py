"""Supports families generically, by the model's own processor and `get_image_features`, with padded rows.

Each placeholder is replaced by the tokens that the processor writes for it. All images of a prompt are one unit: they
are preprocessed and encoded together, as in a separate call of the processor and the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor

from cepo.errors import DataError
from cepo.models.families.family import EncodeText, Family, ImageFeatures, ImageReader
from cepo.models.inputs import ImageInputs, ImageSource

_SIZES_KEPT = 4096
"""The number of image sizes whose token counts are cached; each count needs a call of the processor with an image."""


class ProcessedReader(ImageReader):
    """Reads images by the checkpoint's processor.

    Args:
        placeholder: the text that the chat template writes for an image.
        tower_inputs: the processor's outputs that the vision tower takes besides `pixel_values`.
    """

    def __init__(self, processor: Any, config: Any, *, placeholder: str, tower_inputs: Sequence[str]) -> None:
        self._processor, self._placeholder, self._tower_inputs = processor, placeholder, tuple(tower_inputs)
        self.image_token_id: int = config.image_token_id
        self.placeholder_id: int = processor.tokenizer.convert_tokens_to_ids(placeholder)
        self._between: str = processor.tokenizer.eos_token
        self._tokens_of_size = lru_cache(maxsize=_SIZES_KEPT)(self._measured)

    def read(self, images: Sequence[Image.Image], source: ImageSource | None = None) -> ImageInputs:
        """See `ImageReader.read`.

        Raises:
            DataError: the processor refuses the images.
        """
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
        """See `ImageReader.smallest`; the processor reads an image of `_SMALLEST_SIDES`."""
        images = self.read([Image.new("RGB", _SMALLEST_SIDES)])
        return images.expansions[0], images

    def _measured(self, size: tuple[int, int]) -> int:
        return len(self.read([Image.new("RGB", size)]).expansions[0])

    def _parted(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        between = self._processor.tokenizer.eos_token_id
        parts: list[list[int]] = [[]]
        for token in token_ids:
            if token == between:
                parts.append([])
            else:
                parts[-1].append(token)
        return tuple(map(tuple, parts))


_SMALLEST_SIDES = (32, 32)


class ProcessedFamily(Family):
    """Implements families that use their own processor and forward pass, with padded rows."""

    packs = False
    why_padded = "the family's own processor and forward pass require padded rows"
    tower_inputs: ClassVar[tuple[str, ...]] = ()

    def placeholder_text(self, processor: Any) -> str:
        """Returns the text that the chat template writes for an image."""
        return processor.image_token

    def image_reader(self, processor: Any, config: Any, encode_text: EncodeText) -> ImageReader:
        placeholder = self.placeholder_text(processor)
        return ProcessedReader(processor, config, placeholder=placeholder, tower_inputs=self.tower_inputs)

    def placeholders(self, config: Any) -> tuple[int | None, int | None]:
        """Returns the image token, which is also the placeholder of a whole image."""
        return config.image_token_id, None

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        return {"pixel_values": images.pixel_values, **images.more_tensors}

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Encodes each prompt's images in a separate pass, so that none depends on another prompt's padding."""
        found: list[list[ImageFeatures]] = []
        for one in images:
            inputs = {name: tensor.to(device) for name, tensor in self.model_inputs(one).items()}
            embeddings = model.model.get_image_features(**inputs, return_dict=True).pooler_output
            found.append([ImageFeatures(embeddings=self.joined(embeddings))])
        return found

    def joined(self, embeddings: Any) -> Tensor:
        """Returns the features of all images of a prompt as one tensor."""
        return embeddings


def with_tower_named(name: str) -> str:
    """Inserts `vision_model` into the names of a SigLIP tower, as in published checkpoints; transformers omits it."""
    return re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", name)
