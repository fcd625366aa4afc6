"""Patches blackened at random: the pixels by hand, and what seed and probability decide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from PIL import Image
from tiny_checkpoints import FAMILIES, write_checkpoint

from cepo.models.families import FAMILIES as SUPPORTED
from cepo.models.families import GridFamily
from cepo.models.interface import Video
from cepo.models.patch_mask import PatchMask, black_rows, patch_size_of
from cepo.models.processing import Processing

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
    masked = masked_image(pixels, 0.35, patch_size=2)
    black = numpy.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]], dtype=bool)
    assert (masked[black] == 0).all()
    assert (masked[~black] == pixels[~black]).all()


def test_all_frames_of_a_film_have_the_same_patches() -> None:
    """The film's two patches have the seventh and eighth number, after the six of the image."""
    film = noise(4, 2, frames=3)
    mask = PatchMask(probability=0.35, seed=SEED)
    _, (masked_film,) = mask.masked([Image.fromarray(noise(5, 3))], [film], patch_size=2)
    assert (masked_film[:, :, :2] == 0).all()
    assert (masked_film[:, :, 2:] == film[:, :, 2:]).all()
    assert (film > 0).all(), "the film itself is unchanged"


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


def test_black_rows_are_in_the_order_of_the_processors() -> None:
    """2 x 4 patches in blocks of 2 x 2: below 0.35 are the third, fifth, sixth and seventh number, of rows 0, 1, 1 and 1."""
    mask = PatchMask(probability=0.35, seed=SEED)
    once = black_rows(mask, [[1, 2, 4]], merge_size=2)
    assert once.tolist() == [False, False, True, True, True, False, True, False]
    assert black_rows(mask, [[3, 2, 4]], merge_size=2).tolist() == once.tolist() * 3, "all frames alike"
    two = black_rows(mask, [[1, 2, 4], [1, 2, 4]], merge_size=2)
    assert two[:8].tolist() == once.tolist() != two[8:].tolist()


GRID_TYPES = {name for family in SUPPORTED if isinstance(family, GridFamily) for name in family.model_types}


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name in GRID_TYPES])
def grid_processing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Processing:
    return Processing(str(write_checkpoint(request.param, tmp_path_factory.mktemp("model"))))


def test_the_models_own_patches_are_black_or_untouched(grid_processing: Processing) -> None:
    """Of an image that the processor resizes; squares of the image itself are most often mixed into patches."""
    images = [Image.fromarray(noise(100, 75)), Image.fromarray(noise(61, 90))]
    black = [Image.new("RGB", image.size) for image in images]
    whole = grid_processing.reader.read(images)
    blackened = grid_processing.reader.read(black)

    def shares(square: int | None) -> tuple[float, float]:
        mask = PatchMask(probability=0.5, seed=SEED, square=square)
        masked = grid_processing.load_masked(images, mask)
        assert masked.expansions == whole.expansions
        pixels = masked.tensors["pixel_values"]
        is_black = (pixels == blackened.tensors["pixel_values"]).all(dim=1)
        is_untouched = (pixels == whole.tensors["pixel_values"]).all(dim=1)
        return float(is_black.double().mean()), float(is_untouched.double().mean())

    black_share, untouched_share = shares(None)
    assert black_share + untouched_share == 1
    assert 0.25 < black_share < 0.75
    assert sum(shares(14)) < 0.9


def test_a_square_is_the_released_way(grid_processing: Processing) -> None:
    """Squares of 14 pixels are black in the image that the processor gets, whatever the model's patches are."""
    pixels = noise(100, 75)
    by_hand = Image.fromarray(masked_image(pixels, 0.5, patch_size=14))
    expected = grid_processing.reader.read([by_hand])
    loaded = grid_processing.load_masked([Image.fromarray(pixels)], PatchMask(probability=0.5, seed=SEED, square=14))
    assert loaded.content_key == expected.content_key


def test_an_image_of_the_models_size_has_the_same_mask_both_ways(grid_processing: Processing) -> None:
    """Without resizing a patch is a square; both ways draw the numbers row by row."""
    reader = grid_processing.reader
    side = 4 * reader.patch_size
    image = Image.fromarray(noise(2 * side, side))
    assert reader.read([image]).tensors["image_grid_thw"].tolist() == [[1, 4, 8]]
    mask_of_patches = PatchMask(probability=0.5, seed=SEED, square=None)
    mask_of_squares = PatchMask(probability=0.5, seed=SEED, square=reader.patch_size)
    by_patches = grid_processing.load_masked([image], mask_of_patches)
    by_squares = grid_processing.load_masked([image], mask_of_squares)
    assert by_patches.content_key == by_squares.content_key


def test_a_film_has_the_same_black_patches_at_all_times(grid_processing: Processing) -> None:
    if grid_processing.reader.video_token_id is None:
        pytest.skip("the family reads no videos")
    side = 4 * grid_processing.reader.patch_size
    film = Video(
        frames=noise(side, side, frames=4),
        frame_numbers=(0, 1, 2, 3),
        source_fps=2.0,
        num_source_frames=4,
    )
    masked = grid_processing.load_masked([], PatchMask(probability=0.5, seed=SEED), videos=[film])
    whole = grid_processing.reader.read([], videos=[film])
    (times, height, width), *_ = whole.tensors["video_grid_thw"].tolist()
    is_changed = (masked.tensors["pixel_values_videos"] != whole.tensors["pixel_values_videos"]).any(dim=1)
    by_time = is_changed.view(times, height * width)
    assert times > 1
    assert torch.equal(by_time, by_time[:1].expand_as(by_time))
    assert 0 < int(by_time[0].sum()) < height * width
