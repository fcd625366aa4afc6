"""Images given by address, downloaded from a server of our own: which hosts, how much, how long, and how often."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from local_server import local_server
from PIL import Image

from cepo.data.images import verify_image
from cepo.errors import DataError


class Server:
    """Answers `/image`, redirects and misbehaves; `asked` lists the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.host, self.is_closed = "", threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        buffer = io.BytesIO()
        Image.new("RGB", (9, 4), "blue").save(buffer, format="PNG")
        content = buffer.getvalue()
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
        monkeypatch.setattr("cepo.data.images.LARGEST_DOWNLOAD", 20)
    if path == "/slow":
        monkeypatch.setattr("cepo.foreign_files._DOWNLOAD_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match=words):
        size_at(server, path)
    assert time.monotonic() - began < 10
