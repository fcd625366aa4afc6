"""An image is its upright pixels in 8-bit sRGB on white, whatever its file holds, and nothing else."""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from image_files import EXIF_HEAD, chunk, encoded, exif, jpeg_with, png_of
from PIL import Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from cepo.data.images import load_rgb, verify_image
from cepo.errors import DataError

WHITE = (255, 255, 255)
RED = (255, 0, 0)
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 60, 3), dtype=np.uint8))


def pixels(content: bytes) -> np.ndarray:
    """The pixels of a file, whose size the check states too; they carry nothing of it."""
    image = load_rgb(content, None)
    assert verify_image(content, None) == image.size
    assert (type(image), image.mode, image.format, image.info, dict(image.getexif())) == (
        Image.Image,
        "RGB",
        None,
        {},
        {},
    )
    return np.asarray(image)


def first_row(content: bytes) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in pixels(content)[0].tolist()]


def described(orientation: int, form: str = "attribute") -> bytes:
    """XMP with an orientation."""
    tag = {
        "attribute": f'<rdf:Description tiff:Orientation="{orientation}"/>',
        "single quotes": f"<rdf:Description tiff:Orientation = '{orientation}'/>",
        "element": f"<tiff:Orientation>{orientation}</tiff:Orientation>",
    }[form]
    return f"<x:xmpmeta>{tag}</x:xmpmeta>".encode()


def with_raw_profile(orientation: int, key: str = "Raw profile type exif") -> bytes:
    """A PNG file with EXIF data in hexadecimal digits, as ImageMagick writes them."""
    data = exif(orientation)
    info = PngInfo()
    info.add_text(key, f"\nexif\n{len(data):8}\n{data.hex()}\n", zip=True)
    return encoded(PHOTO, pnginfo=info)


def with_png_xmp(orientation: int) -> bytes:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", described(orientation).decode())
    return encoded(PHOTO, pnginfo=info)


def with_late_exif(orientation: int) -> bytes:
    whole = encoded(PHOTO)
    return whole[:-12] + chunk(b"eXIf", exif(orientation).removeprefix(EXIF_HEAD)) + whole[-12:]


TURNED: dict[str, Callable[[int], bytes]] = {
    "JPEG": lambda number: encoded(PHOTO, "JPEG", exif=exif(number)),
    "progressive JPEG": lambda number: encoded(PHOTO, "JPEG", exif=exif(number), progressive=True),
    "grey JPEG": lambda number: encoded(PHOTO.convert("L"), "JPEG", exif=exif(number)),
    "CMYK JPEG": lambda number: encoded(PHOTO.convert("CMYK"), "JPEG", exif=exif(number)),
    "JPEG by XMP": lambda number: encoded(PHOTO, "JPEG", xmp=described(number)),
    "JPEG by an element of XMP": lambda number: encoded(PHOTO, "JPEG", xmp=described(number, "element")),
    "JPEG with both": lambda number: encoded(PHOTO, "JPEG", exif=exif(number), xmp=described(6)),
    "MPO": lambda number: encoded(PHOTO, "MPO", exif=exif(number), save_all=True, append_images=[PHOTO.rotate(180)]),
    "PNG": lambda number: encoded(PHOTO, exif=exif(number)),
    "PNG with EXIF at its end": with_late_exif,
    "PNG with a raw profile": with_raw_profile,
    "PNG by XMP": with_png_xmp,
    "WebP": lambda number: encoded(PHOTO, "WEBP", lossless=True, exif=exif(number)),
    "WebP by XMP": lambda number: encoded(PHOTO, "WEBP", lossless=True, xmp=described(number)),
    "TIFF": lambda number: encoded(PHOTO, "TIFF", exif=exif(number)),
    "compressed TIFF": lambda number: encoded(PHOTO, "TIFF", compression="tiff_lzw", tiffinfo={0x0112: number}),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", TURNED)
def test_pixels_are_upright_as_pillow_turns_them(form: str, orientation: int) -> None:
    """And turning them again, as vLLM does, changes nothing."""
    content = TURNED[form](orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    assert np.array_equal(pixels(content), np.asarray(upright))
    assert np.array_equal(np.asarray(ImageOps.exif_transpose(load_rgb(content, None))), pixels(content))


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation: int) -> None:
    """EXIF data win over XMP even so, as in Pillow."""
    for content in (
        encoded(PHOTO, exif=exif(orientation)),
        encoded(PHOTO, "WEBP", lossless=True, exif=exif(orientation), xmp=described(6)),
    ):
        assert np.array_equal(pixels(content), np.asarray(PHOTO))


@pytest.mark.parametrize("form", ["attribute", "single quotes", "element"])
def test_every_spelling_of_an_orientation_in_xmp_is_read(form: str) -> None:
    turned = np.asarray(PHOTO.transpose(Image.Transpose.ROTATE_270))
    content = encoded(PHOTO, "WEBP", lossless=True, xmp=described(6, form))
    if form == "single quotes":  # Pillow reads none
        turned = np.asarray(PHOTO)
    assert np.array_equal(pixels(content), turned)


def test_exif_data_cut_anywhere_count_for_none_or_are_read() -> None:
    """XMP counts where they say nothing."""
    whole = exif(6)
    stored = encoded(PHOTO, "JPEG")
    upright = np.asarray(load_rgb(stored, None))
    turned = np.rot90(upright, -1)
    for end in range(len(whole)):
        content = jpeg_with(stored, (0xE1, whole[:end]))
        is_read = end >= 6 + 8 + 2 + 12  # heads, the number of entries, and one entry
        assert np.array_equal(pixels(content), turned if is_read else upright), end
    described_too = jpeg_with(stored, (0xE1, whole[:20]), (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + described(6)))
    assert np.array_equal(pixels(described_too), turned)


def drawing(mode: str, ground: Any, ink: Any) -> Image.Image:
    """One row of two pixels: a ground, which is transparent, and ink."""
    image = Image.new(mode, (2, 1), ground)
    image.putpixel((1, 0), ink)
    return image


def palette(*colours: int, mode: str = "RGB") -> Image.Image:
    """One row with the first three colours of a palette."""
    image = Image.frombytes("P", (3, 1), bytes([0, 1, 2]))
    image.putpalette(colours, mode)
    return image


def grey_16(*values: int) -> list[bytes]:
    return [struct.pack(f">{len(values)}H", *values)]


BLACK_RED_GREEN = (0, 0, 0, 255, 0, 0, 0, 255, 0)
ON_WHITE: dict[str, tuple[bytes, list[tuple[int, ...]]]] = {
    "RGBA": (encoded(drawing("RGBA", (0, 0, 0, 0), (0, 0, 0, 255))), [WHITE, (0, 0, 0)]),
    "LA": (encoded(drawing("LA", (0, 0), (0, 255))), [WHITE, (0, 0, 0)]),
    "half transparent": (encoded(drawing("RGBA", (0, 0, 0, 128), (0, 0, 255, 255))), [(127, 127, 127), (0, 0, 255)]),
    "RGBA in TIFF": (encoded(drawing("RGBA", (0, 0, 0, 0), (*RED, 255)), "TIFF"), [WHITE, RED]),
    "LA in TIFF": (encoded(drawing("LA", (0, 0), (9, 255)), "TIFF"), [WHITE, (9, 9, 9)]),
    "RGBA in WebP": (
        encoded(drawing("RGBA", (0, 0, 0, 0), (*RED, 255)), "WEBP", lossless=True, exact=True),
        [WHITE, RED],
    ),
    "a transparent index": (encoded(palette(*BLACK_RED_GREEN), transparency=0), [WHITE, RED, (0, 255, 0)]),
    "alpha by index": (
        encoded(palette(*BLACK_RED_GREEN), transparency=bytes([0, 255, 128])),
        [WHITE, RED, (127, 255, 127)],
    ),
    "an opaque palette": (encoded(palette(*BLACK_RED_GREEN)), [(0, 0, 0), RED, (0, 255, 0)]),
    "GIF": (encoded(palette(*BLACK_RED_GREEN), "GIF", transparency=0), [WHITE, RED, (0, 255, 0)]),
    "a transparent colour": (
        encoded(drawing("RGB", (1, 2, 3), (1, 2, 4)), transparency=(1, 2, 3)),
        [WHITE, (1, 2, 4)],
    ),
    "a transparent grey": (encoded(drawing("L", 7, 8), transparency=7), [WHITE, (8, 8, 8)]),
    "transparent black of two colours": (encoded(drawing("1", 0, 1), transparency=0), [WHITE, WHITE]),
    "a transparent grey of four": (
        png_of((4, 1), [bytes([0b00011011])], chunk(b"tRNS", b"\0\1"), bits=2),
        [(0, 0, 0), WHITE, (170, 170, 170), WHITE],
    ),
    "a transparent grey of sixteen": (
        png_of((2, 1), [bytes([0x1E])], chunk(b"tRNS", b"\0\x0e"), bits=4),
        [(17, 17, 17), WHITE],
    ),
    "RGBA of 16 bits": (png_of((2, 1), grey_16(0, 0, 0, 0, 65535, 0, 0, 65535), bits=16, kind=6), [WHITE, RED]),
    "LA of 16 bits": (png_of((2, 1), grey_16(0, 0, 0, 65535), bits=16, kind=4), [WHITE, (0, 0, 0)]),
}


@pytest.mark.parametrize("form", ON_WHITE)
def test_transparent_parts_are_white(form: str) -> None:
    content, expected = ON_WHITE[form]
    assert first_row(content) == expected


def ramp(highest: int, kind: str) -> np.ndarray:
    return np.linspace(0, highest, 4096).reshape(64, 64).astype(kind)


SIXTEEN = {
    "PNG": encoded(Image.fromarray(ramp(65535, "uint16"))),
    "TIFF": encoded(Image.fromarray(ramp(65535, "uint16")), "TIFF"),
    "big-endian TIFF": encoded(Image.frombytes("I;16B", (64, 64), ramp(65535, ">u2").tobytes()), "TIFF"),
}


@pytest.mark.parametrize("form", SIXTEEN)
def test_of_16_bits_the_upper_8_are_shown(form: str) -> None:
    """A ramp of 4,096 values has all 256 greys, with a mean of 127.5."""
    grey = pixels(SIXTEEN[form])
    assert len(np.unique(grey)) >= 255
    assert abs(grey.mean() - 127.5) < 1
    assert grey[0, 0].tolist() == [0, 0, 0]
    assert grey[-1, -1].tolist() == [255, 255, 255]


REFUSED = {
    "32-bit integers": (encoded(Image.fromarray(ramp(255, "int32")), "TIFF"), "32 bits, of an unknown range"),
    "floats": (encoded(Image.fromarray(ramp(1, "float32")), "TIFF"), "32 bits, of an unknown range"),
    "a palette's numbers without a palette": (png_of((4, 4), [bytes(4)] * 4, kind=3), "a palette, which is missing"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_has_no_colours_is_refused_by_check_and_run_alike(form: str) -> None:
    content, words = REFUSED[form]
    for read in (verify_image, load_rgb):
        with pytest.raises(DataError, match=f"the image is damaged .ValueError: its .*{words}"):
            read(content, None)


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "CMYK", "YCbCr", "RGBX"])
def test_every_mode_of_tiff_is_read_as_its_colours(mode: str) -> None:
    blocks = Image.new("RGB", (32, 32), "white")
    blocks.paste((0, 0, 0), (0, 0, 16, 32))
    image = blocks.convert("P").convert("PA") if mode == "PA" else blocks.convert(mode)
    options = {"compression": "tiff_lzw"} if mode == "YCbCr" else {}  # Pillow does not read its own without
    read = pixels(encoded(image, "TIFF", **options))
    assert np.abs(read.astype(int) - np.asarray(blocks)).max() <= 3


def test_cmyk_of_adobe_is_not_inverted() -> None:
    content = encoded(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG", quality=100)
    assert np.abs(pixels(content)[8, 8].astype(int) - RED).max() <= 5


def profile_with_red_and_blue_exchanged() -> bytes:
    """sRGB's profile, but what a file calls red is blue."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, blue = profile.index(b"rXYZ"), profile.index(b"bXYZ")
    profile[red : red + 4], profile[blue : blue + 4] = b"bXYZ", b"rXYZ"
    return bytes(profile)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_colours_are_converted_by_the_embedded_profile(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    for mode in ("RGB",) if kind in ("JPEG", "WEBP") else ("RGB", "P", "RGBA"):
        image = Image.new("RGB", (16, 16), RED).convert(mode)
        read = pixels(encoded(image, kind, icc_profile=profile_with_red_and_blue_exchanged(), **options))
        assert np.abs(read[8, 8].astype(int) - (0, 0, 255)).max() <= 3, mode


def test_a_profile_applies_before_white_is_put_below() -> None:
    image = drawing("RGBA", (255, 0, 0, 0), (255, 0, 0, 255))
    ground, ink = first_row(encoded(image, icc_profile=profile_with_red_and_blue_exchanged()))
    assert ground == WHITE
    assert ink[2] > 250 > 5 > ink[0]


def test_srgb_and_unusable_profiles_change_no_pixel(caplog: pytest.LogCaptureFixture) -> None:
    """A broken profile, or one of another colour space, is logged once."""
    srgb, lab = (ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes() for space in ("sRGB", "LAB"))
    caplog.set_level(logging.WARNING, "cepo.data.images")
    for profile, num_logged in ((srgb, 0), (lab, 1), (b"damaged " * 40, 1), (b"damaged too " * 40, 0)):
        caplog.clear()
        for _ in range(2):
            assert np.array_equal(pixels(encoded(PHOTO, icc_profile=profile)), np.asarray(PHOTO))
        assert len(caplog.records) == num_logged, profile[:20]
    grey = encoded(Image.new("L", (4, 4), 100), icc_profile=profile_with_red_and_blue_exchanged())
    assert first_row(grey) == [(100, 100, 100)] * 4


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_frame_is_shown(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(pixels(content)[8, 8].astype(int) - RED).max() <= 3
