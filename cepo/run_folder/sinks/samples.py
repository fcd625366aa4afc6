"""Prepares validation samples for trackers, with their images as images."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from cepo.run_folder.pictures import THUMBNAIL

IMAGE = "image"
"""The column of a sample with the small copy of its image, as a data URI."""


@dataclass(frozen=True, kw_only=True)
class TrackedSample:
    """A validation sample: its texts by column, and the image of its problem, with a name that equal images share."""

    texts: Mapping[str, str]
    image: Image.Image | None
    image_name: str


def tracked_samples(rows: Sequence[Mapping[str, object]]) -> list[TrackedSample]:
    """Returns validation samples with decoded images; a text in place of an image is left out."""
    images: dict[str, Image.Image] = {}
    samples: list[TrackedSample] = []
    for row in rows:
        uri = str(row.get(IMAGE) or "")
        if uri not in images and THUMBNAIL.fullmatch(uri):
            images[uri] = _decoded(uri)
        image_name = hashlib.sha256(uri.encode()).hexdigest()
        samples.append(
            TrackedSample(
                texts={name: str(value) for name, value in row.items() if name != IMAGE},
                image=images.get(uri),
                image_name=image_name[:32],
            )
        )
    return samples


def _decoded(uri: str) -> Image.Image:
    """Returns the image of a data URI that `run_folder.pictures.thumbnail` wrote."""
    _, _, encoded = uri.partition(",")
    content = base64.b64decode(encoded)
    return Image.open(io.BytesIO(content), formats=("WEBP",)).convert("RGB")
