"""Reads images with Pillow: upright pixels in sRGB on white within the pixel limits; nothing else of a file leaves."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy
from PIL import ExifTags, Image, ImageCms, ImageOps

from cepo.data.image_files import file_content, name_of
from cepo.errors import DataError
from cepo.files.safe_files import LFS_POINTER

logger = logging.getLogger(__name__)

LARGEST_ASPECT_RATIO = 200
"""The largest accepted aspect ratio. Qwen's resizing refuses thinner images, which would otherwise end a run midway."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The accepted image formats; an MPO file is read as the JPEG file that it begins with. Pillow's other formats start
programs (EPS: Ghostscript) or do not occur in data sets."""
_ON_ITS_SIDE = (5, 6, 7, 8)
"""The orientations in EXIF data that exchange width and height; others than 1 to 8 have no meaning."""
_INVISIBLE = 2
"""A colour profile that changes no 8-bit value by more than this is taken for sRGB: its conversion would only round."""


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Where images may come from, and within how many pixels each is shown; the settings of `data` have the same names."""

    image_dir: str | None = None
    image_hosts: tuple[str, ...] = ()
    min_pixels: int | None = None
    max_pixels: int | None = None

    def size_within_limits(self, size: tuple[int, int], name: str = "the image") -> tuple[int, int]:
        """Returns the (width, height) within the pixel limits; raises `DataError` if it is empty or too thin."""
        _require_sides(size, name, "")
        limited = limited_size(size, self.min_pixels, self.max_pixels)
        limits = f"data.min_pixels={self.min_pixels or 'null'} and data.max_pixels={self.max_pixels or 'null'}"
        _require_sides(limited, name, f" within {limits}")
        return limited


def _require_sides(size: tuple[int, int], name: str, limits: str) -> None:
    width, height = size
    shorter = min(width, height)
    longer = max(width, height)
    if shorter < 1 or longer / shorter > LARGEST_ASPECT_RATIO:
        raise DataError(
            f"{name} is {width} x {height}{limits}; accepted: sides in a ratio of at most {LARGEST_ASPECT_RATIO}"
        )


# Pixels


def _what_is_wrong(content: bytes, error: Exception) -> str:
    """Says why an image file cannot be opened; what a server answered in its place is often a page of HTML."""
    if not content:
        return "is empty (0 bytes)"
    if content.startswith(LFS_POINTER):
        return "is a pointer of Git LFS to a file that is not here; git lfs pull gets it"
    if content.lstrip().startswith(b"<"):
        return f"is no image but a text that begins with {content.lstrip()[:30].decode('ascii', 'replace')!r}"
    return f"cannot be read ({type(error).__name__})"


def open_image(content: bytes, *, formats: tuple[str, ...] = FORMATS, name: str = "the image") -> Image.Image:
    """Opens an image file, which errors call `name`; formats other than `formats` are not even tried, as `FORMATS` says.

    Its pixels are not decoded. Raises `DataError` if it is not readable, or has more pixels than Pillow accepts.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {error}") from error
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} {_what_is_wrong(content, error)}; accepted: {', '.join(formats)}") from error
    key = image.info.get("transparency")
    if image.format == "PNG" and image.mode == "L" and isinstance(key, int):
        # Pillow widens the greys of 2 and 4 bits to 8, and not the one that is transparent.
        bits = content[24]
        image.info["transparency"] = key * {2: 85, 4: 17}.get(bits, 1)
    return image


def upright_rgb(image: Image.Image) -> Image.Image:
    """Returns a new RGB image without metadata: upright, colours in sRGB, transparent parts on white, 8 bits per channel.

    Raises any error of Pillow's if the image is damaged or has a mode that cannot be converted.
    """
    image = ImageOps.exif_transpose(image)
    profile = image.info.get("icc_profile")
    if image.mode == "P" and not (image.palette and image.palette.palette):
        raise ValueError("its colours are numbers of a palette, which is missing")
    if image.mode.startswith("I;16"):
        upper_bits = numpy.asarray(image) >> 8
        image = Image.fromarray(upper_bits.astype(numpy.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits, of an unknown range; accepted: 8 or 16 bits per channel")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    if image.mode not in ("L", "CMYK"):
        image = image.convert("RGB")
    transform = _to_srgb(profile, image.mode) if profile else None
    rgb = image.convert("RGB") if transform is None else transform.apply(image)
    rgb.info = {}
    return rgb


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> Any:
    """Returns the conversion from a colour profile; None if it is sRGB already or, after a warning, cannot be used."""
    srgb: Any = cast("Any", ImageCms).createProfile("sRGB")  # whose result has no type
    try:
        transform = ImageCms.buildTransform(ImageCms.ImageCmsProfile(io.BytesIO(profile)), srgb, mode, "RGB")
    except (ImageCms.PyCMSError, OSError) as error:
        _warn_of_profile(str(error))
        return None
    if mode != "RGB":
        return transform
    steps = numpy.linspace(0, 255, 17).astype(numpy.uint8)
    colours = numpy.stack(numpy.meshgrid(steps, steps, steps), axis=-1).reshape(17, -1, 3)
    converted = numpy.asarray(transform.apply(Image.fromarray(colours)))
    largest_change = abs(converted.astype(int) - colours).max()
    return None if largest_change <= _INVISIBLE else transform


@lru_cache(maxsize=64)
def _warn_of_profile(reason: str) -> None:
    """Warns once per reason, and not once for each of a hundred thousand images."""
    logger.warning("an image's colour profile cannot be used, and its colours are taken for sRGB: %s", reason)


def verify_image(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> tuple[int, int]:
    """Checks that an image can be decoded; returns its upright (width, height). `value` is as in `load_rgb`.

    Raises `DataError` if it is missing, unreadable, damaged, empty or too thin.
    """
    name = name_of(value)
    image = open_image(file_content(value, image_dir, hosts=hosts), name=name)
    width, height = image.size
    is_jpeg = image.format == "JPEG"
    with _named_damage(name):
        if is_jpeg:  # decoded as a whole, but at an eighth of its size
            image.draft(None, (1, 1))
        rgb = upright_rgb(image)
        is_on_its_side = image.getexif().get(ExifTags.Base.Orientation) in _ON_ITS_SIDE
    size = rgb.size
    if is_jpeg:
        size = (height, width) if is_on_its_side else (width, height)
    _require_sides(size, name, "")
    return size


def load_rgb(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> Image.Image:
    """Returns an image as upright 8-bit sRGB pixels on white, without metadata; of several frames, the first.

    `value` is raw bytes, base64, a path in `image_dir`, an address on one of `hosts`, or a mapping with `bytes` or
    `path`. Raises `DataError` if the image is not readable, has an unaccepted format, or has too many pixels.
    """
    name = name_of(value)
    image = open_image(file_content(value, image_dir, hosts=hosts), name=name)
    with _named_damage(name):
        return upright_rgb(image)


@contextmanager
def _named_damage(name: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} is damaged ({type(error).__name__}: {error})") from error


def limited_size(size: tuple[int, int], min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """Returns the size reduced to at most `max_pixels`, then enlarged to at least `min_pixels`, in the same ratio."""
    width, height = size
    if max_pixels is not None and width * height > max_pixels:
        factor = math.sqrt(max_pixels / (width * height))
        width = max(1, int(width * factor))
        height = max(1, int(height * factor))
    if min_pixels is not None and width * height < min_pixels:
        factor = math.sqrt(min_pixels / (width * height))
        width = math.ceil(width * factor)
        height = math.ceil(height * factor)
    return width, height


# Images of a row


@contextmanager
def located(where: str) -> Generator[None]:
    """Puts a place, such as a row or a column, before the message of a `DataError`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def checked_sizes(images: Sequence[object], column: str | None, rules: ImageRules) -> list[tuple[int, int]]:
    """Checks the images of a row's `column`; returns the sizes with which `decoded_images` shows them.

    Raises `DataError`, with the column's name, for all that it would raise.
    """
    sizes: list[tuple[int, int]] = []
    with located(f"column '{column}'"):
        for value in images:
            size = verify_image(value, rules.image_dir, hosts=rules.image_hosts)
            sizes.append(rules.size_within_limits(size, name_of(value)))
    return sizes


def decoded_images(images: Sequence[object], column: str | None, rules: ImageRules) -> tuple[Image.Image, ...]:
    """Returns the images of a row's `column` as `load_rgb` does, each resized to the pixel limits at once.

    Raises `DataError`, with the column's name, if an image cannot be read.
    """
    decoded: list[Image.Image] = []
    with located(f"column '{column}'"):
        for value in images:
            pixels = load_rgb(value, rules.image_dir, hosts=rules.image_hosts)
            size = rules.size_within_limits(pixels.size, name_of(value))
            decoded.append(pixels if size == pixels.size else pixels.resize(size, Image.Resampling.BICUBIC))
    return tuple(decoded)
