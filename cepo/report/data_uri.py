"""Puts the images of a run into its page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from cepo.data.images import open_image
from cepo.files.safe_files import damaged_as

_LARGEST_SIDE = 640


def data_uri(content: bytes) -> str:
    """Returns a PNG or JPEG image as a data URI, reduced to 640 pixels; raises `DataError` if it cannot be decoded."""
    image = open_image(content, formats=("PNG", "JPEG"))
    if max(image.size) <= _LARGEST_SIDE:
        return f"data:image/png;base64,{_base64(content)}"
    smaller = io.BytesIO()
    with damaged_as(Path("an image of the run"), "cannot be decoded"):
        image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
        image.save(smaller, format="WEBP", quality=80)
    return f"data:image/webp;base64,{_base64(smaller.getvalue())}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
