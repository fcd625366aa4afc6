"""Reads images: checks files, and returns upright pixels in sRGB within the pixel limits; nothing else of a file leaves."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from PIL import Image

from cepo.data.colours import to_srgb_on_white
from cepo.data.image_files import file_content, name_of
from cepo.data.image_metadata import (
    TURNS,
    jpeg_parts,
    require_png_chunks,
    require_png_rows,
    stated_orientation,
    with_alpha_stated,
)
from cepo.errors import DataError

LARGEST_PIXELS = 64_000_000
"""The largest accepted number of pixels (192 MB decoded), because a file of some kilobytes can state any size."""
LARGEST_ASPECT_RATIO = 200
"""The largest accepted aspect ratio. Qwen's resizing refuses thinner images, which would otherwise end a run midway."""
MOST_DECODED = 640_000_000
"""The largest number of pixels in all image files of a row, which take some seconds to decode."""
MOST_HELD = 256_000_000
"""The largest number of pixels of a row within the pixel limits (768 MB), frames of videos included."""
MOST_FRAMES = 36_000
"""The largest number of frames in all videos of a row: 20 minutes at 30 per second. All frames are decoded, because few
files can be entered anywhere."""
MOST_FRAME_PIXELS = 2_000_000_000
"""The largest number of pixels in all these frames, which take some ten seconds to decode: a minute at 1280 x 720 and 30
frames per second, or 5 minutes at 640 x 360."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The accepted image formats; an MPO file is read as the JPEG file that it begins with. Pillow's other formats start
programs (EPS: Ghostscript) or do not occur in datasets."""
_MOST_READS = 10_000
_LARGEST_SLOW = {"bmp_rle": 4_000_000, "ppm": 8_000_000, "ppm_plain": 16_000_000}
"""The largest files, in bytes, of the forms that Pillow decodes in Python, in some seconds: BMP with run lengths, PPM with
another largest value than 255 or 65,535, and PPM as text."""
_TILE_WIDTH = 322
_TILE_HEIGHT = 323
_MOST_SCANS = 30
"""The largest number of scans of a JPEG file of `LARGEST_PIXELS`; smaller images may have more. Cameras write about 10."""


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


class PixelBudget:
    """Bounds the pixels of one row: those that are decoded, and those that are held at the same time."""

    def __init__(self) -> None:
        self._decoded = 0
        self._held = 0
        self._frames = 0
        self._frame_pixels = 0

    def decode(self, size: tuple[int, int]) -> None:
        """Counts an image file; raises `DataError` if the row's files have more than `MOST_DECODED` pixels."""
        self._decoded += size[0] * size[1]
        if self._decoded > MOST_DECODED:
            raise DataError(
                f"the files of the row's images have more than {MOST_DECODED:,} pixels together; store them smaller"
            )

    def play(self, size: tuple[int, int], count: int = 1) -> None:
        """Counts `count` frames of a video file; raises `DataError` for more frames or pixels than a row may have."""
        self._frames += count
        self._frame_pixels += size[0] * size[1] * count
        if size[0] * size[1] > LARGEST_PIXELS:
            raise DataError(f"its frames are {size[0]} x {size[1]}; accepted: at most {LARGEST_PIXELS:,} pixels")
        if self._frames > MOST_FRAMES or self._frame_pixels > MOST_FRAME_PIXELS:
            raise DataError(
                f"the files of the row's videos have {self._frames:,} frames or more, with {self._frame_pixels:,} pixels; "
                f"accepted: at most {MOST_FRAMES:,} frames and {MOST_FRAME_PIXELS:,} pixels together. Cut the videos, or "
                "store them with smaller frames"
            )

    def hold(self, size: tuple[int, int], count: int = 1) -> None:
        """Counts `count` images of the size shown; raises `DataError` if the row has more than `MOST_HELD` pixels."""
        self._held += size[0] * size[1] * count
        if self._held > MOST_HELD:
            raise DataError(
                f"the row's images and frames have more than {MOST_HELD:,} pixels together within the pixel limits; "
                "lower data.max_pixels"
            )


class _BoundedFile(io.BytesIO):
    """A file in memory that is read in few steps until its header is known: some headers would take hours."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.is_bounded = True
        self._reads = _MOST_READS
        self._bytes = 4 * len(content) + 1_000_000

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        if self.is_bounded:
            self._reads -= 1
            self._bytes -= len(content)
            if min(self._reads, self._bytes) < 0:
                raise DataError(f"its header takes more than {_MOST_READS:,} steps to read; write the file again")
        return content


def open_image(content: bytes, *, formats: tuple[str, ...] = FORMATS, name: str = "the image") -> Image.Image:
    """Opens an image file, which errors call `name`; formats other than `formats` are not even tried, as `FORMATS` says.

    Its pixels are not decoded. Raises `DataError` if it is not readable, or has too many pixels.
    """
    metadata: dict[str, object] = {}
    if content.startswith(b"\x89PNG"):
        require_png_chunks(content, name)
    if content.startswith(b"\xff\xd8"):
        parts = jpeg_parts(content, name)
        content = parts.pixels
        metadata = {"exif": parts.exif, "xmp": parts.xmp}
    if content.startswith(b"RIFF"):
        content = with_alpha_stated(content)
    file = _BoundedFile(content)
    try:
        image = Image.open(file, formats=formats)
    except DataError as error:
        raise DataError(f"{name} cannot be read: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large; accepted: at most {LARGEST_PIXELS:,} pixels") from error
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} cannot be read ({type(error).__name__}); accepted: {', '.join(formats)}") from error
    file.is_bounded = False
    image.info |= metadata
    _require_bounds(image, content, name)
    if image.format == "PNG":
        _correct_colour_key(image, bits=content[24])
    return image


def _require_bounds(image: Image.Image, content: bytes, name: str) -> None:
    """Raises `DataError` for an image that would take too much memory or time to decode."""
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        raise DataError(f"{name} is {width} x {height}; accepted: at most {LARGEST_PIXELS:,} pixels")
    tags: Any = getattr(image, "tag_v2", {})  # of TIFF
    tile_width = tags.get(_TILE_WIDTH, 1)  # which may exceed the image's
    tile_height = tags.get(_TILE_HEIGHT, 1)
    are_integers = isinstance(tile_width, int) and isinstance(tile_height, int)
    if not are_integers or tile_width * tile_height > LARGEST_PIXELS:
        raise DataError(f"{name} has tiles of more than {LARGEST_PIXELS:,} pixels; write it again in strips")
    scans = content.count(b"\xff\xda") if image.format == "JPEG" else 0
    if scans > _MOST_SCANS and scans * width * height > _MOST_SCANS * LARGEST_PIXELS:
        raise DataError(
            f"{name} is a JPEG file of {scans:,} scans, which would take too long to decode; write it again"
        )
    tiles: Any = getattr(image, "tile", ())
    decoder = tiles[0][0] if tiles else ""
    largest = _LARGEST_SLOW.get(decoder, len(content))
    if len(content) > largest:
        raise DataError(
            f"{name} has {len(content):,} bytes in a form that decodes slowly; accepted: at most {largest:,}. Write it as PNG"
        )


def _correct_colour_key(image: Image.Image, *, bits: int) -> None:
    """Converts the transparent colour of a PNG file to 8 bits per channel, as Pillow converts its pixels.

    With 16 bits, colours that agree with it in the first 8 are transparent too.
    """
    key = image.info.get("transparency")
    factor = {2: 85, 4: 17}.get(bits, 1)
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * factor
    elif image.mode == "RGB" and isinstance(key, tuple) and bits == 16:
        image.info["transparency"] = tuple(channel >> 8 for channel in cast("tuple[int, ...]", key))


def verify_image(value: object, image_dir: str | None, *, hosts: Collection[str] = ()) -> tuple[int, int]:
    """Checks that an image can be decoded; returns its upright (width, height). `value` is as in `load_rgb`.

    Raises `DataError` if it is missing, unreadable, damaged, empty or too thin.
    """
    name = name_of(value)
    size = _verified_size(open_image(file_content(value, image_dir, hosts=hosts), name=name), name)
    _require_sides(size, name, "")
    return size


def _verified_size(image: Image.Image, name: str) -> tuple[int, int]:
    """Decodes an image as cheaply as its format allows, and one of its pixels as `_upright` does; returns its size."""
    size = image.size
    try:
        if image.format == "JPEG":  # read as a whole, but at an eighth of its size
            image.draft(None, (1, 1))
        _load(image)
        if image.format != "JPEG":  # Pillow turns TIFF files while it loads them
            size = image.size
        to_srgb_on_white(image.crop((0, 0, 1, 1)))
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} is damaged ({error})") from error
    width, height = size
    is_on_its_side = _orientation(image) >= 5
    return (height, width) if is_on_its_side else (width, height)


def _load(image: Image.Image) -> None:
    """Decodes an image; raises any error if it is damaged, also for a PNG file whose data end early but properly."""
    file: Any = getattr(image, "fp", None)
    is_interlaced = bool(image.info.get("interlace"))
    image.load()
    if image.format != "PNG":
        return
    width, height = image.size
    last: Any = image.getpixel((width - 1, height - 1))
    is_zero = last in (0, (0,) * len(image.getbands()))
    if is_zero or is_interlaced:  # missing pixels are zeros
        require_png_rows(file.getvalue())


def _orientation(image: Image.Image) -> int:
    """Returns the orientation that a loaded image still has; Pillow turns TIFF files while it loads them."""
    return 1 if image.format == "TIFF" else stated_orientation(cast("Mapping[object, object]", image.info))


def load_rgb(
    value: object, image_dir: str | None, *, hosts: Collection[str] = (), budget: PixelBudget | None = None
) -> Image.Image:
    """Returns an image as upright 8-bit sRGB pixels on white, without metadata; of several frames, the first.

    `value` is raw bytes, base64, a path in `image_dir`, an address on one of `hosts`, or a mapping with `bytes` or
    `path`. Raises `DataError` if the image is not readable, has an unaccepted format, has too many pixels, or exceeds
    what is left to decode of the row's `budget`.
    """
    name = name_of(value)
    image = open_image(file_content(value, image_dir, hosts=hosts), name=name)
    if budget is not None:
        budget.decode(image.size)
    return _upright(image, name)


def _upright(image: Image.Image, name: str) -> Image.Image:
    try:
        frame = _frame_of_gif(image)
        _load(image)
        pixels = to_srgb_on_white(image)
        if frame is not None and frame != (0, 0, *pixels.size):
            canvas = Image.new("RGB", pixels.size, "white")
            canvas.paste(pixels.crop(frame), frame)
            pixels = canvas
        turn = TURNS.get(_orientation(image))
        return pixels if turn is None else pixels.transpose(turn)
    except Exception as error:  # damaged bytes make decoders raise almost anything
        raise DataError(f"{name} cannot be decoded ({error})") from error


def _frame_of_gif(image: Image.Image) -> tuple[int, int, int, int] | None:
    """Returns the part of a GIF file that its first frame covers; the rest is transparent, which Pillow does not tell."""
    tiles: Any = getattr(image, "tile", ())
    return tuple(tiles[0][1]) if image.format == "GIF" and tiles else None


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


def listed(row: Mapping[str, object], key: str) -> list[Any]:
    """Returns a cell's values as a list: none, one, or several."""
    value = row.get(key)
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple):
        return [*cast("Sequence[Any]", value)]
    return [value]


@contextmanager
def located(where: str) -> Generator[None]:
    """Puts a place, such as a row or a column, before the message of a `DataError`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _values(row: Mapping[str, object], column: str | None, rules: ImageRules) -> list[Any]:
    """Returns a row's images in `column` (None: none); refuses a list of large files before the first is decoded."""
    values = [] if column is None else listed(row, column)
    if len(values) * LARGEST_PIXELS > MOST_DECODED:
        budget = PixelBudget()
        for value in values:
            budget.decode(_opened(value, rules).size)
    return values


def _opened(value: object, rules: ImageRules) -> Image.Image:
    return open_image(file_content(value, rules.image_dir, hosts=rules.image_hosts), name=name_of(value))


def checked_sizes(
    row: Mapping[str, object], column: str | None, rules: ImageRules, budget: PixelBudget
) -> list[tuple[int, int]]:
    """Checks a row's images in `column` (None: none); returns the sizes with which `decoded_images` shows them.

    Raises `DataError`, with the column's name, for all that it would raise, and for pixels beyond the `budget`.
    """
    sizes: list[tuple[int, int]] = []
    with located(f"column '{column}'"):
        for value in _values(row, column, rules):
            name = name_of(value)
            image = _opened(value, rules)
            budget.decode(image.size)
            size = rules.size_within_limits(_verified_size(image, name), name)
            budget.hold(size)
            sizes.append(size)
    return sizes


def decoded_images(
    row: Mapping[str, object], column: str | None, rules: ImageRules, budget: PixelBudget | None = None
) -> tuple[Image.Image, ...]:
    """Returns a row's images in `column` (None: none) as `load_rgb` does, each resized to the pixel limits at once.

    Raises `DataError`, with the column's name, if an image cannot be read, or the row has more pixels than `budget`
    allows; by default, the images have a budget of their own.
    """
    budget = budget or PixelBudget()
    images: list[Image.Image] = []
    with located(f"column '{column}'"):
        for value in _values(row, column, rules):
            pixels = load_rgb(value, rules.image_dir, hosts=rules.image_hosts, budget=budget)
            size = rules.size_within_limits(pixels.size, name_of(value))
            budget.hold(size)
            images.append(pixels if size == pixels.size else pixels.resize(size, Image.Resampling.BICUBIC))
    return tuple(images)
