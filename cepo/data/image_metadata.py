"""Reads the orientation that an image file states, and bounds what else a file states besides its pixels."""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image

from cepo.errors import DataError

_MOST_SEGMENTS = 10_000
_MOST_CHUNKS = 50_000
"""Files have some dozens; a PNG file of 200 MB in the usual chunks of 8 kB has 25,000."""
_INFLATED_AT_ONCE = 1_000_000
_PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
"""The passes of an interlaced PNG file: first column and row, and the steps between columns and rows."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""The numbers of channels of PNG's colour types."""
_ORIENTATION = 0x0112
_INTEGERS = {1: "B", 3: "H", 4: "I", 8: "h", 9: "i"}
"""The codes in EXIF data of integer types and their names in `struct`."""
_XMP_ORIENTATION = re.compile(rb"""tiff:Orientation\s{0,9}(?:=\s{0,9}["']|>)\s{0,9}([1-8])\s{0,9}["'<]""")
_WEBP_ANIMATION = 0x02
_WEBP_ALPHA = 0x10
_EXIF_HEAD = b"Exif\0\0"
_XMP_HEAD = b"http://ns.adobe.com/xap/1.0/\0"
_START_OF_SCAN = 0xDA
_NEEDED = {*range(0xC0, 0xD0), 0xDB, 0xDD} - {0xC8}
"""The segments of a JPEG file that describe its pixels: frame headers, tables, restart intervals."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Maps an orientation to the transposition that turns the image upright; all others leave it as it is."""


@dataclass(frozen=True)
class JpegParts:
    """A JPEG file in parts: `pixels` is a file without metadata but its colour profile; the others may be empty."""

    pixels: bytes
    exif: bytes
    xmp: bytes


def jpeg_parts(content: bytes, name: str) -> JpegParts:
    """Takes EXIF data, XMP and everything else that is not needed for pixels out of a JPEG file.

    Decoders would parse these: EXIF data of some kilobytes can describe gigabytes. Of an MPO file, the first image
    remains. Raises `DataError` for more segments than any camera writes.
    """
    kept_segments = [content[:2]]
    exif = xmp = b""
    position = 2
    for _ in range(_MOST_SEGMENTS):
        position = content.find(b"\xff", position)
        if position < 0 or position + 4 > len(content):
            position = len(content)
            break
        marker = content[position + 1]
        if marker == _START_OF_SCAN:
            break
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:  # these have no length
            position += 2
            continue
        end = position + 2 + max(2, int.from_bytes(content[position + 2 : position + 4]))
        body = content[position + 4 : end]
        if marker == 0xE1 and body.startswith(_EXIF_HEAD):
            exif += body.removeprefix(_EXIF_HEAD) if exif else body
        elif marker == 0xE1 and body.startswith(_XMP_HEAD):
            xmp = body
        elif marker in _NEEDED or _is_for_pixels(marker, body):
            kept_segments.append(content[position:end])
        position = end
    else:
        raise DataError(f"{name} has more than {_MOST_SEGMENTS:,} segments of metadata; it is damaged")
    kept_segments.append(content[position:])
    return JpegParts(b"".join(kept_segments), exif, xmp)


def _is_for_pixels(marker: int, body: bytes) -> bool:
    """Whether a segment for applications says how colours are stored: JFIF, a colour profile, or Adobe's transform."""
    heads = {0xE0: b"JFIF\0", 0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}
    return marker in heads and body.startswith(heads[marker])


def with_alpha_stated(content: bytes) -> bytes:
    """Returns a WebP file; an animated one states that it has an alpha channel.

    Its canvas is transparent where the first frame is not, which a decoder shows as black otherwise.
    """
    is_animated = content[12:16] == b"VP8X" and len(content) > 20 and content[20] & _WEBP_ANIMATION != 0
    if not is_animated:
        return content
    return content[:20] + bytes([content[20] | _WEBP_ALPHA]) + content[21:]


def require_png_chunks(content: bytes, name: str) -> None:
    """Raises `DataError` if a checksum of a PNG file is wrong, its end is missing, or it has too many chunks."""
    view = memoryview(content)
    position = 8
    for _ in range(_MOST_CHUNKS):
        if position + 12 > len(content):
            raise DataError(f"{name} is damaged (it ends before its last chunk)")
        (length,) = struct.unpack_from(">I", content, position)
        end = position + 8 + length
        kind = content[position + 4 : position + 8]
        if end + 4 > len(content):
            raise DataError(f"{name} is damaged (it ends within the chunk {kind!r})")
        if zlib.crc32(view[position + 4 : end]) != struct.unpack_from(">I", content, end)[0]:
            raise DataError(f"{name} is damaged (the checksum of the chunk {kind!r} is wrong)")
        if kind == b"IEND":
            return
        position = end + 4
    raise DataError(f"{name} has more than {_MOST_CHUNKS:,} chunks; write it again with larger ones")


def require_png_rows(content: bytes) -> None:
    """Raises `DataError` if the data of a PNG file hold fewer rows than its header states; the file is whole otherwise."""
    expected = _png_bytes(content)
    inflate = zlib.decompressobj()
    position = 8
    inflated = 0
    while position < len(content) and inflated < expected:
        length, kind = struct.unpack_from(">I4s", content, position)
        data = content[position + 8 : position + 8 + length] if kind == b"IDAT" else b""
        while data and inflated < expected:
            inflated += len(inflate.decompress(data, _INFLATED_AT_ONCE))
            data = inflate.unconsumed_tail
        position += 12 + length
    if inflated < expected:
        raise DataError(f"its data end after {inflated:,} of {expected:,} bytes")


def _png_bytes(content: bytes) -> int:
    """Returns the number of bytes of a PNG file's rows, each with a byte that names its filter."""
    width, height, bits, kind = struct.unpack_from(">IIBB", content, 16)
    is_interlaced = content[28] != 0
    bits_per_pixel = bits * _CHANNELS[kind]
    passes = _PASSES if is_interlaced else [(0, 0, 1, 1)]
    total = 0
    for first_column, first_row, column_step, row_step in passes:
        num_columns = math.ceil((width - first_column) / column_step)
        num_rows = math.ceil((height - first_row) / row_step)
        if num_columns > 0 and num_rows > 0:
            bytes_per_row = 1 + math.ceil(num_columns * bits_per_pixel / 8)
            total += num_rows * bytes_per_row
    return total


def stated_orientation(info: Mapping[object, object]) -> int:
    """Returns the orientation that a file states, 1 to 8 in the numbers of EXIF; 1 (upright) if it states none.

    `info` has what Pillow's files keep there: `exif`, PNG's `Raw profile type exif`, and XMP as `xmp` or
    `XML:com.adobe.xmp`. EXIF data win over XMP; damaged data count for none.
    """
    for key in ("exif", "Raw profile type exif", "Raw profile type APP1"):
        orientation = _of_exif(_as_bytes(info.get(key), is_hexadecimal=key != "exif"))
        if orientation is not None:
            return orientation if orientation in TURNS else 1
    for key in ("XML:com.adobe.xmp", "xmp"):
        match = _XMP_ORIENTATION.search(_as_bytes(info.get(key)))
        if match is not None:
            return int(match[1])
    return 1


def _as_bytes(value: object, *, is_hexadecimal: bool = False) -> bytes:
    """Returns metadata as bytes; empty if they are missing or damaged. ImageMagick writes three lines before digits."""
    try:
        if isinstance(value, str):
            return bytes.fromhex("".join(value.split("\n")[3:])) if is_hexadecimal else value.encode()
    except ValueError:
        return b""
    return value if isinstance(value, bytes) else b""


def _of_exif(exif: bytes) -> int | None:
    """Returns the orientation in EXIF data, which are a TIFF file without pixels; None if they state none."""
    tiff = exif.removeprefix(_EXIF_HEAD).removeprefix(_EXIF_HEAD)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for number in range(count):
            tag, kind, length, value = struct.unpack_from(order + "HHI4s", tiff, start + 2 + 12 * number)
            if tag == _ORIENTATION:
                is_integer = kind in _INTEGERS and length == 1
                return struct.unpack_from(order + _INTEGERS[kind], value)[0] if is_integer else 1
    except struct.error:
        return None
    return None
