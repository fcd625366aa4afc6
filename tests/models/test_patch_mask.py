"""Patches blackened at random: the pixels by hand, and what seed and probability decide."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from PIL import Image

from cepo.models.patch_mask import PatchMask, patch_size_of

SEED = "mask/1/2/3"
"""Its first numbers are 0.737, 0.656, 0.347, 0.667, 0.285, 0.165, 0.328 and 0.363."""


def noise(width: int, height: int, *, frames: int | None = None) -> numpy.ndarray:
    """Random pixels, none of which is black."""
    shape = (height, width, 3) if frames is None else (frames, height, width, 3)
    return numpy.random.default_rng(0).integers(1, 256, shape, dtype=numpy.uint8)


def masked_image(pixels: numpy.ndarray, probability: float, *, patch_size: int, seed: str = SEED) -> numpy.ndarray:
    mask = PatchMask(probability=probability, seed=seed)
    images, _ = mask.masked([Image.fromarray(pixels)], [], patch_size=patch_size)
    return numpy.asarray(images[0])


def test_the_mask_of_a_small_image_is_that_by_hand() -> None:
    """5 x 3 pixels have 3 x 2 patches of side 2; below 0.35 are the third, fifth and sixth number."""
    pixels = noise(5, 3)
    found = masked_image(pixels, 0.35, patch_size=2)
    black = numpy.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]], dtype=bool)
    assert (found[black] == 0).all()
    assert (found[~black] == pixels[~black]).all()


def test_all_frames_of_a_film_have_the_same_patches() -> None:
    """The film's two patches have the seventh and eighth number, after the six of the image."""
    film = noise(4, 2, frames=3)
    mask = PatchMask(probability=0.35, seed=SEED)
    _, (found,) = mask.masked([Image.fromarray(noise(5, 3))], [film], patch_size=2)
    assert (found[:, :, :2] == 0).all()
    assert (found[:, :, 2:] == film[:, :, 2:]).all()
    assert (film > 0).all(), "the film itself is unchanged"


@pytest.mark.parametrize("size", [(1, 1), (14, 14), (15, 29), (100, 7)])
def test_with_0_nothing_is_black_and_with_1_everything(size: tuple[int, int]) -> None:
    pixels = noise(*size)
    assert (masked_image(pixels, 0.0, patch_size=14) == pixels).all()
    assert (masked_image(pixels, 1.0, patch_size=14) == 0).all()


def test_a_larger_probability_keeps_every_black_patch() -> None:
    pixels = noise(140, 140)  # 100 patches
    masks = [(masked_image(pixels, probability, patch_size=14) == 0).all(axis=2) for probability in (0.3, 0.6, 0.9)]
    shares = [float(mask.mean()) for mask in masks]
    assert shares == pytest.approx([0.3, 0.6, 0.9], abs=0.15)
    for smaller, larger in itertools.pairwise(masks):
        assert (larger >= smaller).all()


def test_another_seed_gives_another_mask() -> None:
    pixels = noise(140, 140)
    first = masked_image(pixels, 0.5, patch_size=14)
    assert (masked_image(pixels, 0.5, patch_size=14) == first).all()
    for seed in ("mask/1/2/4", "mask/1/3/3", "mask/2/2/3"):
        assert (masked_image(pixels, 0.5, patch_size=14, seed=seed) != first).any()


def test_images_of_one_prompt_have_masks_of_their_own() -> None:
    image = Image.fromarray(noise(140, 140))
    (first, second), _ = PatchMask(probability=0.5, seed=SEED).masked([image, image], [], patch_size=14)
    assert (numpy.asarray(first) != numpy.asarray(second)).any()


@pytest.mark.parametrize(
    ("vision_config", "expected"), [({"patch_size": 16}, 16), ({"patch_size": [14, 14]}, 14), ({}, 14)]
)
def test_patches_are_those_of_the_vision_tower(vision_config: dict[str, Any], expected: int) -> None:
    config = SimpleNamespace(vision_config=SimpleNamespace(**vision_config))
    assert patch_size_of(cast("Any", config)) == expected
