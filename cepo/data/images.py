"""Reads images of datasets (bytes, path or PIL) as RGB within pixel limits, for problems and in workers."""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.reading import read_source, without_decoding
from cepo.errors import DataError
from cepo.foreign_files import (
    LARGEST_DOWNLOAD,
    LARGEST_IMAGE,
    download,
    open_image,
    read_bytes,
    require_few_pixels,
    require_host,
)
from cepo.models.inputs import ImageInputs, ImageSource
from cepo.models.processing import Processing
from cepo.trees import Tree

logger = logging.getLogger(__name__)

LARGEST_ASPECT_RATIO = 200
"""The largest accepted aspect ratio. Qwen's resizing refuses thinner images, which would otherwise end a run midway."""
_BASE64 = re.compile(r"data:|(iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/=\s]{60,}")
"""A data URL, or the beginning of a PNG, JPEG, GIF or WEBP file in base64."""
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


def image_of(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> Image.Image:
    """Opens an image without decoding its pixels; its size is known.

    Args:
        value: PIL image, raw bytes, path in `image_dir`, address on one of `hosts`, or a mapping with `bytes` or `path`.

    Raises:
        DataError: the image is not readable, has an unaccepted format, or has too many pixels.
    """
    value, name = bytes_or_path(value, hosts=hosts), "the image"
    if isinstance(value, str):
        name = f"the image {value!r}"
        file = Path(image_dir or "") / value
        value = read_bytes(file, within=image_dir, largest=LARGEST_IMAGE)
    if isinstance(value, bytes):
        return open_image(value, formats=FORMATS, name=name)
    if not isinstance(value, Image.Image):
        raise DataError(f"the image is a {type(value).__name__}; accepted: PIL image, bytes, path, or {{bytes, path}}")
    if value.format not in (None, "MPO", *FORMATS):
        raise DataError(f"the image is a {value.format} file; accepted: {', '.join(FORMATS)}")
    require_few_pixels(value)
    return value


def bytes_or_path(value: object, *, hosts: Collection[str] = ()) -> object:
    """Returns a mapping's `bytes`, or its `path` if it has none, and what base64 or an address holds; else the value."""
    if isinstance(value, dict):
        entries = cast("Tree", value)
        value = entries["bytes"] if entries.get("bytes") is not None else entries.get("path")
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return _downloaded(value, hosts)
    if isinstance(value, str) and _BASE64.match(value):
        return _decoded(value)
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


def _decoded(text: str) -> bytes:
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


def load_rgb(
    value: object,
    image_dir: str | None,
    min_pixels: int | None,
    max_pixels: int | None,
    *,
    hosts: Collection[str] = (),
) -> Image.Image:
    """Returns the decoded image in RGB (from palettes, grey and alpha too), upright and within the pixel limits."""
    image = image_of(value, image_dir, hosts=hosts)
    turn = _TURNS.get(_orientation(image))
    try:
        image = image.convert("RGB")
        image = image if turn is None else image.transpose(turn)
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"the image cannot be decoded ({error})") from error
    size = limited_size(image.size, min_pixels, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def listed(row: Mapping[str, object], key: str) -> list[Any]:
    """Returns a cell's values as a list: none, one, or several."""
    value = row.get(key)
    if value is None or value == "":
        return []
    return [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else [value]


def decoded_images(row: Mapping[str, object], config: DataConfig, column: str | None = "") -> tuple[Image.Image, ...]:
    """Returns a row's images in RGB, within the pixel limits, from `column`: "" is `data.image_key`, None has none."""
    values = [] if column is None else listed(row, column or config.image_key)
    return tuple(
        load_rgb(value, config.image_dir, config.min_pixels, config.max_pixels, hosts=config.image_hosts)
        for value in values
    )


class ImageStore:
    """Caches the images of rows, so that each is read and preprocessed once.

    The images equal the trainer's bit for bit, because the same functions read the same rows.
    """

    def __init__(self, config: DataConfig, processing: Processing) -> None:
        self._config, self._processing = config, processing
        self._rows: dict[str, Any] = {}
        self._images: dict[ImageSource, tuple[Image.Image, ...]] = {}
        self._inputs: dict[ImageSource, ImageInputs] = {}

    def images(self, source: ImageSource) -> tuple[Image.Image, ...]:
        """Returns a row's decoded images for the rollout engine; raises `ConfigError` or `DataError` on failure."""
        if source not in self._images:
            self._images[source] = decoded_images(
                self._data(source.data)[source.row], self._config, source.column or ""
            )
        return self._images[source]

    def inputs(self, source: ImageSource) -> ImageInputs:
        """Returns the images of a row as inputs of the vision tower."""
        if source not in self._inputs:
            inputs = self._processing.load_images(self.images(source), source)
            assert inputs is not None, f"row {source.row} of {source.data} has no image"
            self._inputs[source] = inputs
        return self._inputs[source]

    def forget(self) -> None:
        """Frees all images; the data sets remain open."""
        self._images.clear()
        self._inputs.clear()

    def _data(self, name: str) -> Any:
        if name not in self._rows:
            text_columns = (self._config.prompt_key, self._config.answer_key)
            self._rows[name] = without_decoding(read_source(name, text_columns=text_columns))
        return self._rows[name]
