"""Pictures as datasets hold them (bytes, path, PIL), brought to RGB and within pixel limits."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from PIL import Image

from cepo.errors import DataError

LARGEST_ASPECT_RATIO = 200
"""Qwen's resizing rule refuses thinner pictures; refused here with the row's name instead of in the middle of a run."""


def open_image(value: Any, image_dir: str | None) -> Image.Image:
    """A lazily opened picture: its size is known, its pixels are not decoded yet.

    Args:
        value: PIL image, raw bytes, path, or a mapping with `bytes` or `path`.
        image_dir: folder put before paths given as text.

    Raises:
        DataError: nothing that can be read as a picture.
    """
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value))
        if isinstance(value, str):
            return Image.open(Path(image_dir or "") / value)
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"the picture cannot be read ({error})") from error
    raise DataError(f"the picture is a {type(value).__name__}; accepted: PIL image, bytes, path, or {{bytes, path}}")


def verify_image(value: Any, image_dir: str | None) -> tuple[int, int]:
    """Checks that a picture can be decoded, as cheaply as its format allows, and returns (width, height).

    Raises:
        DataError: missing, unreadable, damaged, empty or too thin.
    """
    image = open_image(value, image_dir)
    width, height = image.size
    if min(width, height) < 1 or max(width, height) / min(width, height) > LARGEST_ASPECT_RATIO:
        raise DataError(
            f"the picture is {width} x {height}; accepted: sides in a ratio of at most {LARGEST_ASPECT_RATIO}"
        )
    try:
        if image.format == "PNG":
            image.verify()  # checksums of all chunks
        else:  # only reading the whole stream finds a cut one; a JPEG is read at an eighth of its size
            image.draft(None, (1, 1))
            image.load()
    except (OSError, SyntaxError) as error:  # PIL raises SyntaxError for broken PNG chunks
        raise DataError(f"the picture is damaged ({error})") from error
    return width, height


def limited_size(size: tuple[int, int], min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """The size after shrinking to at most `max_pixels` and then enlarging to at least `min_pixels`, aspect ratio kept."""
    width, height = size
    if max_pixels is not None and width * height > max_pixels:
        factor = math.sqrt(max_pixels / (width * height))
        width, height = max(1, int(width * factor)), max(1, int(height * factor))
    if min_pixels is not None and width * height < min_pixels:
        factor = math.sqrt(min_pixels / (width * height))
        width, height = math.ceil(width * factor), math.ceil(height * factor)
    return width, height


def load_rgb(value: Any, image_dir: str | None, min_pixels: int | None, max_pixels: int | None) -> Image.Image:
    """The decoded picture in RGB, within the pixel limits. Palettes, grey and alpha channels become three channels.

    Raises:
        DataError: the picture cannot be decoded.
    """
    try:
        image = open_image(value, image_dir).convert("RGB")
    except (OSError, SyntaxError) as error:
        raise DataError(f"the picture cannot be decoded ({error})") from error
    size = limited_size(image.size, min_pixels, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
