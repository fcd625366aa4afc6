"""Image files for tests: encoded by Pillow, or written chunk by chunk."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image

EXIF_HEAD = b"Exif\0\0"


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(
    size: tuple[int, int], rows: Sequence[bytes], *extra: bytes, bits: int = 8, kind: int = 0, data: bytes | None = None
) -> bytes:
    """A PNG file of unfiltered rows with further chunks before them; `kind` is its colour type, `data` replaces them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, kind, 0, 0, 0))
    if data is None:
        data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + data + chunk(b"IEND", b"")


def grey_png(side: int, *extra: bytes, data: bytes | None = None) -> bytes:
    """A black PNG file."""
    return png_of((side, side), [bytes(side)] * side, *extra, data=data)


def jpeg_with(content: bytes, *segments: tuple[int, bytes]) -> bytes:
    """A JPEG file with further segments (marker, body) at its beginning."""
    added = [b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body for marker, body in segments]
    return content[:2] + b"".join(added) + content[2:]


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()
