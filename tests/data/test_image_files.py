"""The file of an image: within its folder, in base64, or at an address; nothing else is read, and no message repeats it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from image_files import encoded, png_of
from local_server import local_server
from PIL import Image

from cepo.data.images import load_rgb, verify_image
from cepo.errors import DataError
from cepo.files.own_cache import cache_folder

SMALL = png_of((5, 3), [bytes(5)] * 3)
OUTSIDE = ["../secret.png", "/etc/hostname", "inner/../../secret.png", "link.png", "up/secret.png"]
IRREGULAR = ["a\0b.png", "pipe", "inner", 5000 * "x", "zero.png", "huge.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images with links out of it, a pipe, a device, and a file of a terabyte that takes no space."""
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.png").write_bytes(SMALL)
    (folder / "own.png").symlink_to(folder / "inner" / "a.png")
    (tmp_path / "secret.png").write_bytes(SMALL)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(10**12)
    return folder


@pytest.mark.parametrize("path", [*OUTSIDE, *IRREGULAR], ids=lambda path: path[:20])
def test_paths_outside_image_dir_or_irregular_are_bad_rows(folder: Path, path: str) -> None:
    words = "does not exist|lies outside of|cannot be read|is not a regular file|has 1,000,000,000,000 bytes"
    for value in (path, {"path": path}):
        with pytest.raises(DataError, match=words):
            verify_image(value, str(folder))


def test_paths_within_image_dir_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("inner/a.png", "./inner/../inner/a.png", "own.png", str(folder / "inner" / "a.png")):
        assert verify_image(path, str(folder)) == (5, 3)
    assert verify_image(str(folder / "inner" / "a.png"), None) == (5, 3)
    monkeypatch.chdir(folder.parent)
    assert verify_image("inner/a.png", "images") == (5, 3)
    assert verify_image("images/own.png", None) == (5, 3)
    Path("linked").symlink_to(folder)
    assert verify_image("inner/a.png", "linked") == (5, 3)


def test_bytes_count_before_a_path(folder: Path) -> None:
    """As for the `datasets` library: a path beside them is where they once came from. Bytes may be missing, not empty."""
    assert verify_image({"bytes": SMALL, "path": "gone.png"}, str(folder)) == (5, 3)
    assert verify_image({"bytes": None, "path": "own.png"}, str(folder)) == (5, 3)
    with pytest.raises(DataError, match=r"own\.png' is empty \(0 bytes\)"):
        verify_image({"bytes": b"", "path": "own.png"}, str(folder))


def test_a_file_that_cannot_be_read_is_a_bad_row() -> None:
    """The memory of this process is a regular file, and reading its first page fails as a damaged disk does."""
    with pytest.raises(DataError, match=r"/proc/self/mem' cannot be read: Input/output error"):
        verify_image("/proc/self/mem", None)


# Base64


def spellings(content: bytes) -> list[object]:
    """A file in base64, in all the ways in which rows have it."""
    text = base64.b64encode(content).decode()
    lines = "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    values: list[object] = [
        text,
        f" \n{lines}\n",
        text.rstrip("="),
        base64.urlsafe_b64encode(content).decode(),
        {"bytes": None, "path": text},
        f"DATA:image/PNG;BASE64, {text}",
    ]
    for mime_type in ("image/png", "image/x-ms-bmp", "application/octet-stream", "", "text/plain;charset=US-ASCII"):
        values.append(f"data:{mime_type};base64,{lines}")
    return values


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("size", [(9, 4), (1, 1), (90, 70)])
def test_base64_and_data_urls_are_read_as_the_file(kind: str, size: tuple[int, int]) -> None:
    """In both alphabets, with and without padding, line breaks and head; the image directory is not looked at."""
    content = encoded(Image.effect_noise(size, 50).convert("RGB"), kind)
    expected = load_rgb(content, None).tobytes()
    for value in spellings(content):
        assert verify_image(value, "/nowhere") == size
        assert load_rgb(value, None).tobytes() == expected


LONG = {
    "no base64": 160_000 * "x",
    "base64 of something else": base64.b64encode(9000 * b"no image at all").decode(),
    "damaged base64": base64.b64encode(encoded(Image.new("L", (9, 9)), "BMP")).decode() + 50_000 * "*",
    "base64 of a damaged image": base64.b64encode(encoded(Image.new("L", (9, 9)))[:40] + bytes(90_000)).decode(),
    "data URL of something else": "data:image/png;base64," + base64.b64encode(bytes(90_000)).decode(),
    "long path": "a" * 200 + "/" + "b" * 3000 + ".png",
    "long address": "https://example.org/" + "a" * 90_000,
    "long host": "http://" + "h" * 3000,
    "control characters": 2000 * "d\0",
}


@pytest.mark.parametrize("kind", LONG)
def test_no_message_repeats_a_long_value(kind: str) -> None:
    """At most about 100 of its characters."""
    text = LONG[kind]
    for value in (text, {"bytes": None, "path": text}, {"bytes": text}):
        for read_function in (verify_image, load_rgb):
            with pytest.raises(DataError) as caught:
                read_function(value, None)
            message = str(caught.value)
            assert len(message) < 400
            assert text[:120] not in message


def test_damaged_base64_and_that_of_a_program_are_refused() -> None:
    text = base64.b64encode(SMALL).decode()
    with pytest.raises(DataError, match="is not valid base64"):
        verify_image(text[:-6] + "*", None)
    program = base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode()
    with pytest.raises(DataError, match="cannot be read"):
        verify_image("data:image/png;base64," + program, None)


def test_a_large_file_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.data.image_files.LARGEST_IMAGE", 50)
    for value in (SMALL, base64.b64encode(SMALL).decode()):
        with pytest.raises(DataError, match="accepted: at most 50"):
            verify_image(value, None)


# Addresses


class Server:
    """Answers `/image`, redirects and misbehaves; `asked` lists the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.host = ""
        self.content = encoded(Image.new("RGB", (9, 4), "blue"))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if request.path.startswith(("/to?", "/loop")):
            request.send_response(302)
            request.send_header("Location", request.path.partition("?")[2] or "/loop")
            request.end_headers()
            return
        request.send_response(404 if request.path == "/missing" else 200)
        missing = 5 if request.path == "/cut" else 0
        request.send_header("Content-Length", str(len(self.content) + missing))
        request.end_headers()
        request.wfile.write(self.content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server()
    with local_server(server.answer) as server.host:
        yield server


def size_at(server: Server, path: str) -> tuple[int, int]:
    return verify_image(f"http://{server.host}{path}", None, hosts=[f"http://{server.host}"])


def test_an_address_is_downloaded_once_and_then_kept(server: Server) -> None:
    for _ in range(3):
        assert size_at(server, "/image?of=one") == (9, 4)
    assert size_at(server, "/to?/image") == (9, 4)
    assert size_at(server, "/image?of=two") == (9, 4)
    assert server.asked == ["/image?of=one", "/to?/image", "/image", "/image?of=two"]


def test_a_download_that_was_changed_is_downloaded_again(server: Server) -> None:
    assert size_at(server, "/image") == (9, 4)
    (file,) = cache_folder("downloads").glob("*/content")
    for content in (SMALL, file.read_bytes()[:-1], b""):
        file.write_bytes(content)
        assert size_at(server, "/image") == (9, 4)
    assert server.asked == ["/image"] * 4


@pytest.mark.parametrize("hosts", [[], ["http://127.0.0.1"], ["http://example.org"], ["without http"]])
def test_an_address_of_a_host_not_named_is_refused(server: Server, hosts: list[str]) -> None:
    """Neither is it asked for, nor read from the cache; port and http belong to the name."""
    if hosts == ["without http"]:
        hosts = [server.host]
    assert size_at(server, "/image") == (9, 4)
    with pytest.raises(DataError, match=rf"data.image_hosts, which is .*Name http://{server.host} there"):
        verify_image(f"http://{server.host}/image", None, hosts=hosts)
    assert server.asked == ["/image"]


def test_https_is_asked_of_a_host_named_without_scheme(server: Server) -> None:
    """The server speaks no TLS, so the handshake fails, and nothing is asked for in clear text."""
    address = f"https://{server.host}/image"
    with pytest.raises(DataError, match=r"cannot be downloaded: .*SSL"):
        verify_image(address, None, hosts=[server.host])
    with pytest.raises(DataError, match="Name 127"):
        verify_image(address, None, hosts=[f"http://{server.host}"])
    assert server.asked == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/to?http://example.org/image", r"are downloaded only from data\.image_hosts"),
        ("/to?file:///etc/passwd", "is not allowed"),
        ("/to?//example.org/image", r"are downloaded only from data\.image_hosts"),
        ("/loop", "cannot be downloaded: .*302"),
        ("/missing", "cannot be downloaded: .*404"),
        ("/cut", "the answer is incomplete"),
    ],
)
def test_redirects_away_and_odd_answers_are_refused(server: Server, path: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        size_at(server, path)


def test_a_large_download_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.data.image_files.LARGEST_DOWNLOAD", 20)
    with pytest.raises(DataError, match="it has more than 20 bytes"):
        size_at(server, "/image")
