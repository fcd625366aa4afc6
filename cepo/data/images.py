"""Reads images: opens, checks, turns upright and resizes them; nothing of the file but pixels leaves."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import math
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import ExifTags, Image

from cepo.errors import DataError
from cepo.foreign_files import LARGEST_DOWNLOAD, LARGEST_IMAGE, download, read_bytes, require_host
from cepo.trees import Tree

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig

logger = logging.getLogger(__name__)

LARGEST_PIXELS = 64_000_000
"""The largest accepted number of pixels (192 MB decoded), because a file of some kilobytes can state any size."""
LARGEST_ASPECT_RATIO = 200
"""The largest accepted aspect ratio. Qwen's resizing refuses thinner images, which would otherwise end a run midway."""
_BASE64 = re.compile(r"data:|(iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/=\s]{60,}")
"""A data URL, or the beginning of a PNG, JPEG, GIF or WEBP file in base64."""
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


def image_of(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> Image.Image:
    """Opens an image without decoding its pixels; its size is known.

    `value` is raw bytes, base64, a path in `image_dir`, an address on one of `hosts`, or a mapping with `bytes` or
    `path`. Raises `DataError` if the image is not readable, has an unaccepted format, or has too many pixels.
    """
    value, name = bytes_or_path(value, hosts=hosts), "the image"
    if isinstance(value, str):
        name = f"the image {value!r}"
        value = read_bytes(Path(image_dir or "") / value, within=image_dir, largest=LARGEST_IMAGE)
    if not isinstance(value, bytes):
        raise DataError(f"the image is a {type(value).__name__}; accepted: bytes, path, or {{bytes, path}}")
    return open_image(value, name=name)


def open_image(content: bytes, *, formats: tuple[str, ...] = FORMATS, name: str = "the image") -> Image.Image:
    """Opens an image file, which errors call `name`; formats other than `formats` are not even tried, as `FORMATS` says."""
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} cannot be read ({type(error).__name__}); accepted: {', '.join(formats)}") from error
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        raise DataError(f"the image is {width} x {height}; accepted: at most {LARGEST_PIXELS:,} pixels")
    return image


def bytes_or_path(value: object, *, hosts: Collection[str] = ()) -> object:
    """Returns a mapping's `bytes`, or its `path` if it has none, and what base64 or an address holds; else the value."""
    if isinstance(value, dict):
        entries = cast("Tree", value)
        value = entries["bytes"] if entries.get("bytes") is not None else entries.get("path")
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return _downloaded(value, hosts)
    if isinstance(value, str) and _BASE64.match(value):
        return _from_base64(value)
    return value


def _downloaded(address: str, hosts: Collection[str]) -> bytes:
    """Returns the content of an address, which is downloaded once into the user's cache, for all processes and runs."""
    name = hashlib.sha256(address.encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cepo" / "images"
    require_host(address, hosts)
    if not (folder / name).exists():
        content = download(address, hosts, largest=LARGEST_DOWNLOAD)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.replace(file.name, folder / name)
    return read_bytes(folder / name, within=folder, largest=LARGEST_DOWNLOAD)


def _from_base64(text: str) -> bytes:
    """Returns the content of base64, with or without the head of a data URL."""
    if len(text) > LARGEST_IMAGE:
        raise DataError(f"{text[:20]}... has {len(text):,} characters of base64; accepted: at most {LARGEST_IMAGE:,}")
    content = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except ValueError as error:
        raise DataError(f"{text[:20]}... is not valid base64; encode the file again, or give its path") from error


def verify_image(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> tuple[int, int]:
    """Checks as cheaply as the format allows that an image can be decoded; returns its upright (width, height).

    Raises `DataError` if it is missing, unreadable, damaged, empty or too thin.
    """
    image = image_of(value, image_dir, hosts=hosts)
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
        found = exif.get(ExifTags.Base.Orientation)
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


def load_rgb(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> Image.Image:
    """Returns the decoded image in RGB (from palettes, grey and alpha too), upright."""
    image = image_of(value, image_dir, hosts=hosts)
    turn = _TURNS.get(_orientation(image))
    try:
        image = image.convert("RGB")
        return image if turn is None else image.transpose(turn)
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"the image cannot be decoded ({error})") from error


def listed(row: Mapping[str, object], key: str) -> list[Any]:
    """Returns a cell's values as a list: none, one, or several."""
    value = row.get(key)
    if value is None or value == "":
        return []
    return [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else [value]


def decoded_images(row: Mapping[str, object], config: DataConfig, column: str | None = "") -> tuple[Image.Image, ...]:
    """Returns a row's images in RGB, within the pixel limits, from `column`: "" is `data.image_key`, None has none."""
    values = [] if column is None else listed(row, column or config.image_key)
    images = [load_rgb(value, config.image_dir, hosts=config.image_hosts) for value in values]
    sizes = [limited_size(image.size, config.min_pixels, config.max_pixels) for image in images]
    return tuple(
        image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
        for image, size in zip(images, sizes, strict=True)
    )
