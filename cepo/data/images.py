"""Reads images of datasets (bytes, path or PIL) as RGB within pixel limits."""

from __future__ import annotations

import io
import logging
import math
import os
import stat
from pathlib import Path
from typing import Any, cast

from PIL import Image

from cepo.errors import DataError

logger = logging.getLogger(__name__)

LARGEST_ASPECT_RATIO = 200
"""The largest accepted aspect ratio. Qwen's resizing refuses thinner images, which would otherwise end a run midway."""

LARGEST_PIXELS = 64_000_000
"""The largest accepted number of pixels (192 MB decoded), because a file of some kilobytes can state any size."""
_ORIENTATION_TAG = 0x0112
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The accepted image formats; JPEG files may turn out to be MPO. Pillow's other formats start programs (EPS:
Ghostscript) or do not occur in datasets."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Maps the orientation in EXIF data to the transposition that turns the image upright."""


def media_file(path: str, image_dir: str | None) -> Path:
    """Returns the regular file that a row names, which must lie within `image_dir` if that is set.

    Raises:
        DataError: the file is elsewhere, does not exist, or is not regular (reading a pipe could block forever).
    """
    file = Path(image_dir or "") / path
    if image_dir is not None and not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(image_dir)):
        raise DataError(f"the file {path!r} lies outside of data.image_dir {image_dir}; accepted: paths within it")
    try:
        mode = file.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise DataError(f"the file {str(file)!r} cannot be read ({error})") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{str(file)!r} is not a regular file; accepted: a file with the data")
    return file


def open_image(value: Any, image_dir: str | None) -> Image.Image:
    """Opens an image without decoding its pixels; its size is known.

    Args:
        value: PIL image, raw bytes, path, or a mapping with `bytes` or `path`.
        image_dir: folder prepended to paths given as text.

    Raises:
        DataError: the image is not readable, has an unaccepted format, or has too many pixels.
    """
    image = _opened(value, image_dir)
    if image.format not in (None, "MPO", *FORMATS):
        raise DataError(f"the image is a {image.format} file; accepted: {', '.join(FORMATS)}")
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        raise DataError(f"the image is {width} x {height}; accepted: at most {LARGEST_PIXELS:,} pixels")
    return image


def _opened(value: Any, image_dir: str | None) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    value = bytes_or_path(value)
    try:
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value), formats=FORMATS)
        if isinstance(value, str):
            return Image.open(media_file(value, image_dir), formats=FORMATS)
    except DataError:
        raise
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"the image cannot be read ({error}); accepted: {', '.join(FORMATS)}") from error
    raise DataError(f"the image is a {type(value).__name__}; accepted: PIL image, bytes, path, or {{bytes, path}}")


def bytes_or_path(value: Any) -> Any:
    """Returns a mapping's `bytes`, or its `path` if it has none; returns other values unchanged."""
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    return entries["bytes"] if entries.get("bytes") is not None else entries.get("path")


def verify_image(value: Any, image_dir: str | None) -> tuple[int, int]:
    """Checks as cheaply as the format allows that an image can be decoded; returns its upright (width, height).

    Raises:
        DataError: the image is missing, unreadable, damaged, empty or too thin.
    """
    image = open_image(value, image_dir)
    width, height = image.size
    if _orientation(image) >= 5:
        width, height = height, width
    if min(width, height) < 1 or max(width, height) / min(width, height) > LARGEST_ASPECT_RATIO:
        raise DataError(
            f"the image is {width} x {height}; accepted: sides in a ratio of at most {LARGEST_ASPECT_RATIO}"
        )
    try:
        if image.format == "PNG":
            image.verify()  # checksums of all chunks
        else:  # truncation is found only by reading the whole stream; a JPEG is read at an eighth of its size
            image.draft(None, (1, 1))
            image.load()
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"the image is damaged ({error})") from error
    return width, height


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if none can be read. Pillow already turns TIFF files upright."""
    if image.format not in ("JPEG", "MPO", "PNG", "WEBP"):
        return 1
    try:
        if image.format == "PNG":  # Pillow's own reader would decode the whole image first
            exif = Image.Exif()
            exif.load(image.info.get("exif") or b"")
        else:
            exif = image.getexif()
        found = exif.get(_ORIENTATION_TAG)
    except Exception as error:
        logger.debug("an image's EXIF data cannot be read and is taken for none: %s", error)
        return 1
    return found if found in _TURNS else 1


def limited_size(size: tuple[int, int], min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """Returns the size reduced to at most `max_pixels`, then enlarged to at least `min_pixels`, in the same ratio."""
    width, height = size
    if max_pixels is not None and width * height > max_pixels:
        factor = math.sqrt(max_pixels / (width * height))
        width, height = max(1, int(width * factor)), max(1, int(height * factor))
    if min_pixels is not None and width * height < min_pixels:
        factor = math.sqrt(min_pixels / (width * height))
        width, height = math.ceil(width * factor), math.ceil(height * factor)
    return width, height


def load_rgb(value: Any, image_dir: str | None, min_pixels: int | None, max_pixels: int | None) -> Image.Image:
    """Returns the decoded image in RGB (from palettes, grey and alpha too), upright and within the pixel limits.

    Raises:
        DataError: the image cannot be decoded.
    """
    image = open_image(value, image_dir)
    turn = _TURNS.get(_orientation(image))
    try:
        image = image.convert("RGB")
        image = image if turn is None else image.transpose(turn)
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"the image cannot be decoded ({error})") from error
    size = limited_size(image.size, min_pixels, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
