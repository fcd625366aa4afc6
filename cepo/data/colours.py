"""Converts decoded images of any mode to 8-bit sRGB on white."""

from __future__ import annotations

import io
import logging
from functools import lru_cache
from typing import Any, Literal, cast

import numpy
from PIL import Image, ImageCms

logger = logging.getLogger(__name__)

_LARGEST_PROFILE = 8_000_000
"""In bytes; profiles for printing have two million."""
_SPACES = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK", "LAB": "Lab"}
"""The colour space of profiles, as they name it, that fits a mode of Pillow."""
_INVISIBLE = 2
"""A profile that changes no 8-bit value by more than this is taken for sRGB: its conversion would only round."""
_RANGES = {"PNG": 65535, "PPM": 65535}
"""The largest value of formats that Pillow may read as 32-bit integers."""


def to_srgb_on_white(image: Image.Image) -> Image.Image:
    """Returns a new RGB image without metadata: colours in sRGB, transparent parts on white, 8 bits per channel.

    Raises any error of Pillow's if the image is damaged or has a mode that cannot be converted.
    """
    image.load()
    profile = image.info.get("icc_profile")
    transparency = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        values = numpy.asarray(image)
        colours = Image.fromarray((values >> 8).astype(numpy.uint8))
        alpha = None
        if transparency is not None:
            alpha = Image.fromarray((values != transparency).astype(numpy.uint8) * 255)
    elif image.mode in ("I", "F"):
        colours = _scaled(image)
        alpha = None
    else:
        colours, alpha = _separated(image)
    colours = _in_srgb(colours, profile)
    if alpha is not None and alpha.getextrema() != (255, 255):
        white = Image.new("RGB", image.size, "white")
        white.paste(colours, mask=alpha)
        colours = white
    colours.info = {}
    return colours


def _separated(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Returns the colours of an 8-bit image in a mode without alpha, and its alpha, or None if it is opaque."""
    if not image.has_transparency_data:
        mode = image.mode if image.mode in _SPACES else "RGB"
        return image.convert("L" if image.mode == "1" else mode), None
    if image.mode in ("RGBa", "La"):  # colours multiplied by alpha
        image = image.convert(image.mode.upper())
    with_alpha = image.convert("RGBA")
    is_grey = image.mode in ("1", "L", "LA")
    colours = with_alpha.getchannel("R") if is_grey else with_alpha.convert("RGB")
    return colours, with_alpha.getchannel("A")


def _scaled(image: Image.Image) -> Image.Image:
    """Returns numbers as grey: by the format's range, as 0 to 1 or 0 to 255 if all lie there, else by their extremes.

    NaN is black.
    """
    values = numpy.array(image, dtype=numpy.float32)
    finite = numpy.isfinite(values)
    darkest = 0.0
    brightest = 0.0
    if finite.any():
        darkest = float(values.min(where=finite, initial=numpy.inf))
        brightest = float(values.max(where=finite, initial=-numpy.inf))
    common_range: float | None = None
    if image.mode == "I" and image.format in _RANGES:
        common_range = _RANGES[image.format]
    elif image.mode == "F" and darkest >= 0 and brightest <= 1:
        common_range = 1
    elif darkest >= 0 and brightest <= 255:
        common_range = 255
    if common_range is not None:
        darkest = 0.0
        brightest = float(common_range)
    # Both are halved, because the difference of two finite numbers may be infinite. One array is used throughout, because
    # a large image fills 256 MB.
    half_span = brightest / 2 - darkest / 2
    values /= 2
    values -= darkest / 2
    values /= half_span if half_span > 0 else 1.0
    numpy.nan_to_num(values, copy=False, nan=0.0, posinf=1.0, neginf=0.0)
    values.clip(0, 1, out=values)
    values *= 255
    return Image.fromarray(numpy.rint(values, out=values).astype(numpy.uint8))


def _in_srgb(colours: Image.Image, profile: object) -> Image.Image:
    """Returns the colours in RGB, converted by an embedded colour profile if it fits and differs from sRGB."""
    transform = None
    if isinstance(profile, bytes) and colours.mode in _SPACES:
        transform = _transform(profile, colours.mode)
    if transform is None and colours.mode == "LAB":  # it has no meaning of its own in RGB
        transform = _lab()
    if transform is None:
        return colours if colours.mode == "RGB" else colours.convert("RGB")
    converted = transform.apply(colours)
    converted.info = {}
    return converted


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """Returns the conversion from a colour profile to sRGB; None if the profile cannot be used or is sRGB already."""
    try:
        if len(profile) > _LARGEST_PROFILE:
            raise ValueError(f"it has {len(profile):,} bytes")
        source: Any = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        if space != _SPACES[mode]:
            raise ValueError(f"it is made for {space}, the image is {mode}")
        transform = ImageCms.buildTransform(source, _built_in("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError) as error:
        _log_unusable(str(error))
        return None
    return None if mode == "RGB" and _changes_nothing(transform) else transform


@lru_cache(maxsize=64)
def _log_unusable(reason: str) -> None:
    """Logs once per reason, and not once for each of a hundred thousand images."""
    logger.warning("an image's colour profile cannot be used, and its colours are taken for sRGB: %s", reason)


def _changes_nothing(transform: Any) -> bool:
    """Whether a conversion from RGB leaves 17 x 17 x 17 colours as they are, but for rounding."""
    steps = numpy.linspace(0, 255, 17).astype(numpy.uint8)
    cube = numpy.stack(numpy.meshgrid(steps, steps, steps), axis=-1).reshape(17, -1, 3)
    converted = numpy.asarray(transform.apply(Image.fromarray(cube)))
    return int(abs(converted.astype(int) - cube.astype(int)).max()) <= _INVISIBLE


@lru_cache(maxsize=1)
def _lab() -> Any:
    return ImageCms.buildTransform(_built_in("LAB"), _built_in("sRGB"), "LAB", "RGB")


def _built_in(space: Literal["sRGB", "LAB"]) -> Any:
    return cast("Any", ImageCms).createProfile(space)  # whose result has no type
