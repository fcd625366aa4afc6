"""An image is its upright pixels in 8-bit sRGB on white, whatever its file holds, and nothing else; or a bad row."""

from __future__ import annotations

import io
import logging
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_files import cases
from image_files import EXIF_HEAD, chunk, encoded, exif, grey_png, jpeg_with, png_of
from PIL import Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from cepo.data.images import load_rgb, verify_image
from cepo.errors import DataError

ROWS: list[Any] = cases(__file__, "images.yaml")
RED = (255, 0, 0)
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 60, 3), dtype=np.uint8))
XMP_HEAD = b"http://ns.adobe.com/xap/1.0/\0"


def pixels(content: bytes) -> np.ndarray:
    """The pixels of a file, whose size the check states too; they carry nothing of it."""
    image = load_rgb(content, None)
    assert verify_image(content, None) == image.size
    assert type(image) is Image.Image
    assert image.mode == "RGB"
    assert image.format is None
    assert image.info == {}
    assert dict(image.getexif()) == {}
    return np.asarray(image)


def require_close(content: bytes, color: tuple[int, int, int], most: int) -> None:
    difference = pixels(content)[8, 8].astype(int) - color
    assert np.abs(difference).max() <= most


# Orientation


def described(orientation: int, *, as_element: bool = False) -> bytes:
    """XMP with an orientation."""
    tag = f'<rdf:Description tiff:Orientation="{orientation}"/>'
    if as_element:
        tag = f"<tiff:Orientation>{orientation}</tiff:Orientation>"
    return f"<x:xmpmeta>{tag}</x:xmpmeta>".encode()


def png_with_text(key: str, text: str) -> bytes:
    info = PngInfo()
    info.add_itxt(key, text)
    return encoded(PHOTO, pnginfo=info)


def png_with_raw_profile(orientation: int) -> bytes:
    """EXIF data in hexadecimal digits, as ImageMagick writes them."""
    data = exif(orientation)
    info = PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(data):8}\n{data.hex()}\n", zip=True)
    return encoded(PHOTO, pnginfo=info)


def png_with_late_exif(orientation: int) -> bytes:
    whole = encoded(PHOTO)
    return whole[:-12] + chunk(b"eXIf", exif(orientation).removeprefix(EXIF_HEAD)) + whole[-12:]


def turned_files(number: int) -> dict[str, bytes]:
    """Files of each form with an orientation."""
    data = exif(number)
    return {
        "JPEG": encoded(PHOTO, "JPEG", exif=data),
        "progressive JPEG": encoded(PHOTO, "JPEG", exif=data, progressive=True),
        "grey JPEG": encoded(PHOTO.convert("L"), "JPEG", exif=data),
        "CMYK JPEG": encoded(PHOTO.convert("CMYK"), "JPEG", exif=data),
        "JPEG by XMP": encoded(PHOTO, "JPEG", xmp=described(number)),
        "JPEG by an element of XMP": encoded(PHOTO, "JPEG", xmp=described(number, as_element=True)),
        "JPEG with both": encoded(PHOTO, "JPEG", exif=data, xmp=described(6)),
        "MPO": encoded(PHOTO, "MPO", exif=data, save_all=True, append_images=[PHOTO.rotate(180)]),
        "PNG": encoded(PHOTO, exif=data),
        "PNG with EXIF at its end": png_with_late_exif(number),
        "PNG with a raw profile": png_with_raw_profile(number),
        "PNG by XMP": png_with_text("XML:com.adobe.xmp", described(number).decode()),
        "WebP": encoded(PHOTO, "WEBP", lossless=True, exif=data),
        "WebP by XMP": encoded(PHOTO, "WEBP", lossless=True, xmp=described(number)),
        "TIFF": encoded(PHOTO, "TIFF", exif=data),
        "compressed TIFF": encoded(PHOTO, "TIFF", compression="tiff_lzw", tiffinfo={0x0112: number}),
    }


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", turned_files(1))
def test_pixels_are_upright_as_pillow_turns_them(form: str, orientation: int) -> None:
    """And turning them again, as vLLM does, changes nothing."""
    content = turned_files(orientation)[form]
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    upright_pixels = pixels(content)
    assert np.array_equal(upright_pixels, np.asarray(upright))
    again = ImageOps.exif_transpose(load_rgb(content, None))
    assert np.array_equal(np.asarray(again), upright_pixels)


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation: int) -> None:
    """EXIF data win over XMP even so, as in Pillow."""
    data = exif(orientation)
    assert np.array_equal(pixels(encoded(PHOTO, exif=data)), np.asarray(PHOTO))
    with_exif_and_xmp = encoded(PHOTO, "WEBP", lossless=True, exif=data, xmp=described(6))
    assert np.array_equal(pixels(with_exif_and_xmp), np.asarray(PHOTO))
    assert verify_image(encoded(PHOTO, "JPEG", exif=data), None) == PHOTO.size, "by which its tokens are counted"


def test_exif_data_cut_anywhere_count_for_none_or_are_read() -> None:
    """XMP counts where they say nothing."""
    whole = exif(6)
    stored = encoded(PHOTO, "JPEG")
    upright = np.asarray(load_rgb(stored, None))
    turned = np.rot90(upright, -1)
    heads_number_and_an_entry = 6 + 8 + 2 + 12
    for end in range(len(whole)):
        expected = turned if end >= heads_number_and_an_entry else upright
        assert np.array_equal(pixels(jpeg_with(stored, (0xE1, whole[:end]))), expected), end
    with_exif_and_xmp = jpeg_with(stored, (0xE1, whole[:20]), (0xE1, XMP_HEAD + described(6)))
    assert np.array_equal(pixels(with_exif_and_xmp), turned)


# Colours


def stored_row(case: Any) -> bytes:
    """The file that a case of images.yaml describes."""
    if "file" in case:
        file = case["file"]
        chunks = [chunk(b"tRNS", bytes.fromhex(file["tRNS"]))] if "tRNS" in file else []
        row = bytes.fromhex(file["row"])
        return png_of((file["width"], 1), [row], *chunks, bits=file["bits"], kind=file["kind"])
    values = case["pixels"]
    image = Image.new(case["mode"], (len(values), 1))
    for place, value in enumerate(values):
        image.putpixel((place, 0), tuple(value) if isinstance(value, list) else value)
    if "palette" in case:
        image.putpalette(case["palette"])
    options: dict[str, object] = {}
    if "transparency" in case:
        transparency = case["transparency"]
        options["transparency"] = tuple(transparency) if isinstance(transparency, list) else transparency
    if case.get("format") == "WEBP":
        options |= {"lossless": True, "exact": True}
    return encoded(image, case.get("format", "PNG"), **options)


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["name"])
def test_every_form_of_colours_is_shown_or_refused(case: Any) -> None:
    """The check refuses what the run refuses, with the same reason."""
    content = stored_row(case)
    if "shown" in case:
        assert pixels(content)[0].tolist() == case["shown"]
        return
    for read_function in (verify_image, load_rgb):
        with pytest.raises(DataError, match=f"the image is damaged .ValueError: .*{case['refused']}"):
            read_function(content, None)


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "CMYK", "YCbCr", "RGBX"])
def test_every_mode_of_tiff_is_read_as_its_colours(mode: str) -> None:
    blocks = Image.new("RGB", (32, 32), "white")
    blocks.paste((0, 0, 0), (0, 0, 16, 32))
    image = blocks.convert("P") if mode == "PA" else blocks
    options = {"compression": "tiff_lzw"} if mode == "YCbCr" else {}  # Pillow does not read its own without
    colours = pixels(encoded(image.convert(mode), "TIFF", **options))
    assert np.abs(colours.astype(int) - np.asarray(blocks)).max() <= 3


def test_cmyk_of_adobe_is_not_inverted() -> None:
    image = Image.new("RGB", (16, 16), RED).convert("CMYK")
    require_close(encoded(image, "JPEG", quality=100), RED, most=5)


def built_in_profile(space: Any) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


def profile_with_red_and_blue_exchanged() -> bytes:
    """sRGB's profile, but what a file calls red is blue."""
    profile = bytearray(built_in_profile("sRGB"))
    red = profile.index(b"rXYZ")
    blue = profile.index(b"bXYZ")
    profile[red : red + 4] = b"bXYZ"
    profile[blue : blue + 4] = b"rXYZ"
    return bytes(profile)


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_colours_are_converted_by_the_embedded_profile(kind: str, mode: str) -> None:
    image = Image.new("RGB", (16, 16), RED).convert(mode)
    content = encoded(image, kind, icc_profile=profile_with_red_and_blue_exchanged())
    require_close(content, (0, 0, 255), most=3)


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("WEBP", {"lossless": True})])
def test_a_compressed_file_has_its_profile_too(kind: str, options: dict[str, object]) -> None:
    image = Image.new("RGB", (16, 16), RED)
    content = encoded(image, kind, icc_profile=profile_with_red_and_blue_exchanged(), **options)
    require_close(content, (0, 0, 255), most=3)


def test_a_transparent_part_is_white_whatever_the_profile() -> None:
    image = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    content = encoded(image, icc_profile=profile_with_red_and_blue_exchanged())
    require_close(content, (255, 255, 255), most=1)


def test_srgb_changes_no_pixel(caplog: pytest.LogCaptureFixture) -> None:
    content = encoded(PHOTO, icc_profile=built_in_profile("sRGB"))
    assert np.array_equal(pixels(content), np.asarray(PHOTO))
    assert caplog.records == []


def test_an_unusable_profile_is_told_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """One of another colour space, and two that are broken in the same way."""
    caplog.set_level(logging.WARNING, "cepo.data.images")
    for profile in (built_in_profile("LAB"), b"damaged " * 40, b"damaged too " * 40):
        for _ in range(2):
            content = encoded(PHOTO, icc_profile=profile)
            assert np.array_equal(pixels(content), np.asarray(PHOTO))
    assert len(caplog.records) == 2
    grey = encoded(Image.new("L", (16, 16), 100), icc_profile=profile_with_red_and_blue_exchanged())
    require_close(grey, (100, 100, 100), most=0)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_frame_is_shown(kind: str) -> None:
    first = Image.new("RGB", (16, 16), "red")
    second = Image.new("RGB", (16, 16), "blue")
    options = {"lossless": True} if kind == "WEBP" else {}
    require_close(encoded(first, kind, save_all=True, append_images=[second], **options), RED, most=3)


def test_an_image_loaded_twice_is_the_same() -> None:
    """What is loaded, written as PNG and loaded again is equal: nothing is applied a second time."""
    values = np.random.default_rng(1).integers(0, 255, (24, 40, 4), dtype=np.uint8)
    for mode in ("RGBA", "LA", "L", "P", "CMYK"):
        stored = Image.fromarray(values).convert(mode)
        once = load_rgb(encoded(stored, "TIFF", exif=exif(6)), None)
        assert load_rgb(encoded(once), None).tobytes() == once.tobytes()


# Damaged and hostile files

BOMB = zlib.compress(bytes(80_000_000), 9)
GREY = zlib.compress(bytes(64 * 65))
BAD = {
    "oversized text": grey_png(64, chunk(b"zTXt", b"k\0\0" + BOMB)),
    "180 million pixels": png_of((13_400, 13_400), [bytes(1676)] * 13_400, bits=1),
    "no data": grey_png(64, data=b""),
    "empty data": grey_png(64, data=chunk(b"IDAT", b"")),
    "data cut": grey_png(64, data=chunk(b"IDAT", GREY[:10])),
    "data that are no data": grey_png(64, data=chunk(b"IDAT", b"no data at all")),
    "rows that are no rows": grey_png(64, data=chunk(b"IDAT", zlib.compress(bytes([77]) * 64 * 65))),
    "wrong checksum": grey_png(64)[:-20] + b"\0" + grey_png(64)[-19:],
    "half a JPEG": encoded(Image.new("L", (99, 99)), "JPEG")[:300],
    "half a WebP": encoded(Image.new("L", (99, 99)), "WEBP")[:40],
    "half a TIFF": encoded(Image.new("L", (99, 99)), "TIFF")[:5000],
    "header alone": grey_png(64)[:40],
    "empty": b"",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\nshowpage\n%%EOF\n",
    "text": b"no image",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_bad_row_and_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_program(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", no_program)
    monkeypatch.setattr(subprocess, "check_call", no_program)
    file = tmp_path / "image"
    file.write_bytes(BAD[name])
    for value in (BAD[name], {"bytes": BAD[name]}, {"path": str(file)}, str(file)):
        for read_function in (verify_image, load_rgb):
            with pytest.raises(DataError, match="the image"):
                read_function(value, None)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"", r"is empty \(0 bytes\)"), (b"\n<!DOCTYPE html><html>", "begins with '<!DOCTYPE html><html>'")],
)
def test_what_is_no_image_is_said_in_words(content: bytes, fault: str) -> None:
    """A download that failed leaves an empty file or the page of a server, and Pillow's class of error says neither."""
    with pytest.raises(DataError, match=fault):
        verify_image(content, None)
