"""Images given as text in base64."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from cepo.data.images import load_rgb, verify_image
from cepo.errors import DataError


def encoded() -> str:
    buffer = io.BytesIO()
    image = Image.new("RGB", (9, 4), "blue")
    image.putpixel((3, 2), (255, 1, 2))
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_base64_and_data_urls_are_read_as_the_file(head: str) -> None:
    """Line breaks, as MIME writes them, are allowed; the image directory is not looked at."""
    text = encoded()
    lines = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for value in (head + text, head + lines, {"bytes": None, "path": head + text}):
        assert verify_image(value, "/nowhere") == (9, 4)
        assert load_rgb(value, None, None, None).getpixel((3, 2)) == (255, 1, 2)


def test_damaged_base64_and_other_content_are_refused() -> None:
    with pytest.raises(DataError, match="is not valid base64"):
        verify_image(encoded()[:-6] + "*", None)
    with pytest.raises(DataError, match="cannot be read"):
        verify_image("data:image/png;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode(), None)


def test_base64_beyond_the_largest_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.data.images.LARGEST_IMAGE", 50)
    with pytest.raises(DataError, match="accepted: at most 50"):
        verify_image(encoded(), None)
