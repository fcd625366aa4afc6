"""Blackens patches of images at random, for teachers that see the student's image in part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
from PIL import Image

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_PATCH_SIZE = 14
"""Side of a patch in pixels for towers that state none; that of Qwen2-VL, Qwen2.5-VL and SigLIP."""


def patch_size_of(config: PreTrainedConfig) -> int:
    """Returns the side in pixels of the patches of a model's vision tower."""
    vision_config: Any = config.vision_config  # type: ignore[attr-defined]
    size = getattr(vision_config, "patch_size", None) or DEFAULT_PATCH_SIZE
    return size if isinstance(size, int) else int(size[0])  # InternVL states height and width, which are equal


@dataclass(frozen=True, kw_only=True)
class PatchMask:
    """Blackens each square patch of a prompt's images with `probability`, independently.

    `seed` determines all choices, so that equal masks blacken equal images alike, in every process. With probability 0
    no pixel changes; with 1 all images are black. A patch that is black with some probability is also black with every
    larger one.
    """

    probability: float
    seed: str

    def masked(
        self, images: Sequence[Image.Image], films: Sequence[numpy.ndarray], *, patch_size: int
    ) -> tuple[list[Image.Image], list[numpy.ndarray]]:
        """Returns copies of `images` and of `films`, each (frames, height, width, 3) uint8, with black patches.

        Patches of `patch_size` pixels are counted from the upper left corner; those at the right and lower edges may be
        smaller. All frames of a film have the same black patches: other ones in each frame would together show it all.
        """
        generator = random.Random(self.seed)
        masked_images: list[Image.Image] = []
        for image in images:
            pixels = numpy.array(image.convert("RGB"))  # (height, width, 3), a copy
            height, width, _ = pixels.shape
            pixels[self._black_pixels(height, width, patch_size, generator)] = 0
            masked_images.append(Image.fromarray(pixels))
        masked_films: list[numpy.ndarray] = []
        for film in films:
            frames = film.copy()
            _, height, width, _ = frames.shape
            frames[:, self._black_pixels(height, width, patch_size, generator)] = 0
            masked_films.append(frames)
        return masked_images, masked_films

    def _black_pixels(self, height: int, width: int, patch_size: int, generator: random.Random) -> numpy.ndarray:
        """Returns (height, width) whether each pixel is black; the patches are drawn row by row."""
        num_rows = -(-height // patch_size)  # rounded up
        num_columns = -(-width // patch_size)
        numbers = [generator.random() for _ in range(num_rows * num_columns)]
        is_black = numpy.array(numbers).reshape(num_rows, num_columns) < self.probability
        pixels = is_black.repeat(patch_size, axis=0).repeat(patch_size, axis=1)
        return pixels[:height, :width]
