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
    """Answers `/image`, redirects `/elsewhere` to it and misbehaves; `asked` lists the paths."""

    def __init__(self) -> None:
        self.host, self.asked, self.is_closed = "", list[str](), threading.Event()
        buffer = io.BytesIO()
        Image.new("RGB", (9, 4), "blue").save(buffer, format="PNG")
        self._content = buffer.getvalue()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if request.path == "/missing":
            request.send_error(404)
            return
        request.send_response(302 if request.path == "/elsewhere" else 200)
        if request.path == "/elsewhere":
            request.send_header("Location", "/image")
        elif request.path != "/slow":
            request.send_header("Content-Length", str(len(self._content) + 5 * (request.path == "/cut")))
        request.end_headers()
        while request.path == "/slow" and not self.is_closed.wait(0.05):
            request.wfile.write(b"x")
        request.wfile.write(self._content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server()
    with local_server(server.answer) as server.host:
        yield server
        server.is_closed.set()


def size_at(server: Server, path: str) -> tuple[int, int]:
    return verify_image(f"http://{server.host}{path}", None, hosts=[f"http://{server.host}"])


def test_an_address_is_downloaded_once_and_then_kept(server: Server) -> None:
    for _ in range(3):
        assert size_at(server, "/image?of=one") == (9, 4)
    assert server.asked == ["/image?of=one"]


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
    with pytest.raises(DataError, match=r"cannot be downloaded: .*SSL"):
        verify_image(f"https://{server.host}/image", None, hosts=[server.host])
    with pytest.raises(DataError, match=rf"Name {server.host} there"):
        verify_image(f"https://{server.host}/image", None, hosts=[f"http://{server.host}"])
    assert server.asked == []


def test_a_name_of_a_private_address_is_refused_unasked(server: Server) -> None:
    named = server.host.replace("127.0.0.1", "localhost")
    with pytest.raises(DataError, match=r"localhost leads to .*, which is not public"):
        verify_image(f"http://{named}/image", None, hosts=[f"http://{named}"])
    assert server.asked == []


def test_errors_and_incomplete_or_large_answers_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the server answers 404"):
        size_at(server, "/missing")
    with pytest.raises(DataError, match="the answer is incomplete"):
        size_at(server, "/cut")
    with pytest.raises(DataError, match="answers 302 Found; redirects are not followed"):
        size_at(server, "/elsewhere")
    assert server.asked[-1] == "/elsewhere"
    monkeypatch.setattr("cepo.data.images.LARGEST_DOWNLOAD", 20)
    with pytest.raises(DataError, match="it has more than 20 bytes"):
        size_at(server, "/image")


def test_a_server_that_sends_byte_by_byte_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.foreign_files._DOWNLOAD_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0\.5 s|the answer is incomplete"):
        size_at(server, "/slow")
    assert time.monotonic() - began < 10
