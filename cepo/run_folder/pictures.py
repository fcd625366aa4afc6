"""Encodes images as PNG files and as small previews in records."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL = re.compile(r"data:image/webp;base64,[A-Za-z0-9+/=]+")
_THUMBNAIL_PIXELS = 96


def png_bytes(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def thumbnail(images: Sequence[Image]) -> str | None:
    """Returns a small copy of the first image as a data URI, for tables of responses; None without images."""
    if not images:
        return None
    small = images[0].convert("RGB")
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, format="WEBP", quality=75)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/webp;base64,{encoded}"
