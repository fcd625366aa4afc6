"""An image of a dataset is a bad row or an image: it starts no program, reads no other file, hangs and crashes nothing.

One given by address is downloaded from a server of our own: from which hosts, how much, how long, and how often.
"""

from __future__ import annotations

import base64
import io
import os
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from local_server import local_server
from PIL import Image

from cepo.data.images import load_rgb, verify_image
from cepo.errors import DataError


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int = 4, height: int = 4, *extra: bytes) -> bytes:
    """A grey PNG of zeros with further chunks before its data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    packer = zlib.compressobj()
    rows = b"".join(packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BOMB = zlib.compress(bytes(80_000_000), 9)
HOSTILE = {
    "oversized zTXt": png(4, 4, chunk(b"zTXt", b"k\0\0" + BOMB)),
    "oversized iTXt": png(4, 4, chunk(b"iTXt", b"k\0\1\0\0\0" + BOMB)),
    "oversized iCCP": png(4, 4, chunk(b"iCCP", b"k\0\0" + BOMB)),
    "170 million pixels": png(13_000, 13_000),
    "header alone": png()[:40],
    "empty": b"",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\nshowpage\n%%EOF\n",
    "text": b"no image",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_bad_row_and_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_program(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", no_program)
    monkeypatch.setattr(subprocess, "check_call", no_program)
    file = tmp_path / "image"
    file.write_bytes(HOSTILE[name])
    for value in (HOSTILE[name], {"bytes": HOSTILE[name]}, {"path": str(file)}, str(file)):
        for read in (lambda value: verify_image(value, None), lambda value: load_rgb(value, None)):
            with pytest.raises(DataError, match="the image") as caught:
                read(value)
            assert "BytesIO" not in str(caught.value), "no address of a buffer"


OUTSIDE = ["../secret.png", "/etc/hostname", "inner/../../secret.png", "link.png", "up/secret.png"]
IRREGULAR = ["a\0b.png", "pipe", "inner", 5000 * "x", "zero.png", "huge.png"]


@pytest.mark.parametrize("path", [*OUTSIDE, *IRREGULAR], ids=lambda path: path[:20])
def test_paths_outside_image_dir_or_irregular_are_bad_rows(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png())
    os.mkfifo(folder / "pipe")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "zero.png").symlink_to("/dev/zero")
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(10**12)  # takes no space on the disk
    for value in (path, {"path": path}):
        with pytest.raises(
            DataError,
            match=r"does not exist|lies outside of|cannot be read|is not a regular file|has 1,000,000,000,000 bytes",
        ):
            verify_image(value, str(folder))


def test_paths_within_image_dir_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.png").write_bytes(png(5, 3))
    (folder / "link.png").symlink_to(folder / "inner" / "a.png")
    for path in ("inner/a.png", "./inner/../inner/a.png", "link.png", str(folder / "inner" / "a.png")):
        assert verify_image(path, str(folder)) == (5, 3)
    assert verify_image(str(folder / "inner" / "a.png"), None) == (5, 3)
    monkeypatch.chdir(tmp_path)
    assert verify_image("inner/a.png", "images") == (5, 3)
    assert verify_image("images/link.png", None) == (5, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_as_its_exif_data_say(kind: str, orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16, 0] = 255  # red in one corner, green in the next
    upright[:8, 16:, 1] = 255
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that undoes each turn
    stored = Image.fromarray(upright)
    if orientation in back:
        stored = stored.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    content = encoded(stored, kind, exif=exif, **options)
    assert verify_image(content, None) == (32, 16)
    shown = load_rgb(content, None)
    assert shown.size == (32, 16)
    assert np.abs(np.asarray(shown).astype(int) - upright).max() < 40


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0", b"garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"]
)
def test_exif_data_that_cannot_be_read_count_for_none(exif: bytes) -> None:
    content = encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    assert verify_image(content, None) == (8, 4)
    assert load_rgb(content, None).size == (8, 4)


def blue() -> str:
    """An image in base64, blue with a red point."""
    image = Image.new("RGB", (9, 4), "blue")
    image.putpixel((3, 2), (255, 1, 2))
    return base64.b64encode(encoded(image)).decode()


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_base64_and_data_urls_are_read_as_the_file(head: str) -> None:
    """Line breaks, as MIME writes them, are allowed; the image directory is not looked at."""
    text = blue()
    lines = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for value in (head + text, head + lines, {"bytes": None, "path": head + text}):
        assert verify_image(value, "/nowhere") == (9, 4)
        assert load_rgb(value, None).getpixel((3, 2)) == (255, 1, 2)


def test_damaged_large_and_other_base64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "data:image/png;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode()
    for text, words in ((blue()[:-6] + "*", "is not valid base64"), (program, "cannot be read")):
        with pytest.raises(DataError, match=words):
            verify_image(text, None)
    monkeypatch.setattr("cepo.data.image_files.LARGEST_IMAGE", 50)
    with pytest.raises(DataError, match="accepted: at most 50"):
        verify_image(blue(), None)


class Server:
    """Answers `/image`, redirects and misbehaves; `asked` lists the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.host, self.is_closed = "", threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        content = encoded(Image.new("RGB", (9, 4), "blue"))
        is_redirect = request.path.startswith(("/to?", "/loop"))
        request.send_response(302 if is_redirect else 404 if request.path == "/missing" else 200)
        if is_redirect:
            request.send_header("Location", request.path.partition("?")[2] or "/loop")
        elif request.path != "/slow":
            request.send_header("Content-Length", str(len(content) + 5 * (request.path == "/cut")))
        request.end_headers()
        while request.path == "/slow" and not self.is_closed.wait(0.05):
            request.wfile.write(b"x")
        if not is_redirect:
            request.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server()
    with local_server(server.answer) as server.host:
        yield server
        server.is_closed.set()


def size_at(server: Server, path: str, *more_hosts: str) -> tuple[int, int]:
    return verify_image(f"http://{server.host}{path}", None, hosts=[f"http://{server.host}", *more_hosts])


def test_an_address_is_downloaded_once_and_then_kept(server: Server) -> None:
    for _ in range(3):
        assert size_at(server, "/image?of=one") == (9, 4)
    assert size_at(server, "/to?/image") == (9, 4)
    assert server.asked == ["/image?of=one", "/to?/image", "/image"]


@pytest.mark.parametrize("hosts", [[], ["http://127.0.0.1"], ["http://example.org"], "without http"])
def test_an_address_of_a_host_not_named_is_refused(server: Server, hosts: list[str] | str) -> None:
    """Neither is it asked for, nor read from the cache; port and http belong to the name."""
    hosts = [server.host] if isinstance(hosts, str) else hosts
    assert size_at(server, "/image") == (9, 4)
    with pytest.raises(DataError, match=rf"data.image_hosts, which is .*Name http://{server.host} there"):
        verify_image(f"http://{server.host}/image", None, hosts=hosts)
    assert server.asked == ["/image"]


def test_https_is_asked_of_a_host_named_without_scheme(server: Server) -> None:
    """The server speaks no TLS, so the handshake fails, and nothing is asked for in clear text."""
    for hosts, words in (([server.host], r"cannot be downloaded: .*SSL"), ([f"http://{server.host}"], "Name 127")):
        with pytest.raises(DataError, match=words):
            verify_image(f"https://{server.host}/image", None, hosts=hosts)
    assert server.asked == []


def test_a_name_of_a_private_address_is_refused_unasked(server: Server) -> None:
    named = server.host.replace("127.0.0.1", "localhost")
    with pytest.raises(DataError, match=r"localhost leads to .*, which is not public"):
        verify_image(f"http://{named}/image", None, hosts=[f"http://{named}"])
    with pytest.raises(DataError, match="not public"):
        size_at(server, f"/to?http://{named}/image", f"http://{named}")
    assert server.asked == [f"/to?http://{named}/image"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/to?http://example.org/image", r"are downloaded only from data\.image_hosts"),
        ("/to?file:///etc/passwd", r"are downloaded only from data\.image_hosts"),
        ("/to?//example.org/image", r"are downloaded only from data\.image_hosts"),
        ("/loop", "more than 3 redirects"),
        ("/missing", "the server answers 404"),
        ("/cut", "the answer is incomplete"),
        ("/image", "it has more than 20 bytes"),
        ("/slow", r"no answer within 0\.5 s|the answer is incomplete"),  # byte by byte
    ],
)
def test_redirects_away_errors_and_odd_answers_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    if path == "/image":
        monkeypatch.setattr("cepo.data.image_files.LARGEST_DOWNLOAD", 20)
    if path == "/slow":
        monkeypatch.setattr("cepo.foreign_files._DOWNLOAD_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match=words):
        size_at(server, path)
    assert time.monotonic() - began < 10
