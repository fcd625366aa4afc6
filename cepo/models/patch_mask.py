"""Blackens patches of images at random, for teachers that see the student's image in part.

The patches are those that a vision tower reads, after its processor has resized the image (`black_rows`), or squares of
the image before that (`PatchMask.masked`), as in the released code of VPPO and PAPO.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool
    from transformers import PreTrainedConfig

_PIXELS_AND_GRIDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
_DEFAULT_PATCH_SIZE = 14
"""Side of a patch in pixels for towers that state none; that of Qwen2-VL, Qwen2.5-VL and SigLIP."""


def patch_size_of(config: PreTrainedConfig) -> int:
    """Returns the side in pixels of the patches of a model's vision tower."""
    vision_config: Any = config.vision_config  # type: ignore[attr-defined]
    size = getattr(vision_config, "patch_size", None) or _DEFAULT_PATCH_SIZE
    return size if isinstance(size, int) else int(size[0])  # InternVL states height and width, which are equal


def black_rows(mask: PatchMask, grids: Sequence[Sequence[int]], merge_size: int) -> Bool[Tensor, " patches"]:
    """Returns which patches of images are black, in the order in which processors with grids write their pixels.

    A grid is (time, height, width) in patches: the two latter are multiples of `merge_size`. The numbers of an image are
    drawn row by row, and serve all its times: other patches in each frame of a film would together show it all. Pixels
    are written by blocks of `merge_size` x `merge_size` patches, row by row, and row by row within a block.
    """
    generator = random.Random(mask.seed)
    parts: list[Tensor] = []
    for times, height, width in grids:
        drawn = mask.drawn(generator, height, width)
        is_black = torch.from_numpy(drawn)
        by_row = is_black.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size))
        by_block = by_row.transpose(1, 2)  # (rows of blocks, blocks, merge_size, merge_size)
        of_one_time = by_block.flatten()
        parts.append(of_one_time.repeat(times))
    return torch.cat(parts)


def with_black_patches(
    tensors: Mapping[str, Tensor], black: Mapping[str, Tensor], mask: PatchMask, merge_size: int
) -> dict[str, Tensor]:
    """Returns what a processor with grids wrote of images, some patches replaced by those of `black` images of their size."""
    present = [(pixels, grid) for pixels, grid in _PIXELS_AND_GRIDS if pixels in tensors]
    grids: list[list[int]] = []
    for _, grid in present:
        grids += tensors[grid].tolist()
    is_black = black_rows(mask, grids, merge_size)
    of_kinds = is_black.split([len(tensors[pixels]) for pixels, _ in present])
    masked = dict(tensors)
    for (pixels, _), rows in zip(present, of_kinds, strict=True):
        masked[pixels] = torch.where(rows.unsqueeze(1).to(tensors[pixels].device), black[pixels], tensors[pixels])
    return masked


@dataclass(frozen=True, kw_only=True)
class PatchMask:
    """Blackens each square patch of a prompt's images with `probability`, independently.

    With `square`, the patches are squares of as many pixels, counted in the image before the processor resizes it. With
    None they are the model's own, where the processor writes them one by one; elsewhere squares of the tower's size.
    `seed` determines all choices, so that equal masks blacken equal images alike, in every process. With probability 0
    no pixel changes; with 1 all images are black. A patch that is black with some probability is also black with every
    larger one.
    """

    probability: float
    seed: str
    square: int | None = None

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
        """Returns (height, width) whether each pixel is black."""
        num_rows = -(-height // patch_size)  # rounded up
        num_columns = -(-width // patch_size)
        is_black = self.drawn(generator, num_rows, num_columns)
        pixels = is_black.repeat(patch_size, axis=0).repeat(patch_size, axis=1)
        return pixels[:height, :width]

    def drawn(self, generator: random.Random, num_rows: int, num_columns: int) -> numpy.ndarray:
        """Returns (rows, columns) whether each patch is black, which is drawn row by row."""
        numbers = [generator.random() for _ in range(num_rows * num_columns)]
        return numpy.array(numbers).reshape(num_rows, num_columns) < self.probability
