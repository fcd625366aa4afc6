"""Images given by address, downloaded from a server of our own: which hosts, how much, how long, and how often."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cepo.data.images import verify_image
from cepo.errors import DataError


class Server:
    """Answers `/image`, redirects and misbehaves; `asked` lists the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        server = self
        buffer = io.BytesIO()
        Image.new("RGB", (9, 4), "blue").save(buffer, format="PNG")

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                if self.path.startswith(("/to?", "/loop")):
                    self.send_response(302)
                    self.send_header("Location", self.path.partition("?")[2] or "/loop")
                    self.end_headers()
                elif self.path == "/missing":
                    self.send_error(404)
                elif self.path == "/slow":
                    self.send_response(200)
                    self.end_headers()
                    while not server.is_closed.wait(0.05):
                        self.wfile.write(b"x")
                else:
                    content = buffer.getvalue()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content) + 5 * (self.path == "/cut")))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Stays silent."""

        self.is_closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.is_closed.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server()
    yield server
    server.close()


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
    with pytest.raises(DataError, match=r"cannot be downloaded: .*SSL"):
        verify_image(f"https://{server.host}/image", None, hosts=[server.host])
    with pytest.raises(DataError, match=rf"Name {server.host} there"):
        verify_image(f"https://{server.host}/image", None, hosts=[f"http://{server.host}"])
    assert server.asked == []


def test_a_redirect_leads_neither_to_another_host_nor_to_a_file(server: Server) -> None:
    for target in ("http://example.org/image", "file:///etc/passwd", "//example.org/image"):
        with pytest.raises(DataError, match=r"are downloaded only from data\.image_hosts"):
            size_at(server, f"/to?{target}")
    with pytest.raises(DataError, match="more than 3 redirects"):
        size_at(server, "/loop")


def test_a_name_of_a_private_address_is_refused_unasked(server: Server) -> None:
    named = server.host.replace("127.0.0.1", "localhost")
    with pytest.raises(DataError, match=r"localhost leads to .*, which is not public"):
        verify_image(f"http://{named}/image", None, hosts=[f"http://{named}"])
    with pytest.raises(DataError, match="not public"):
        size_at(server, f"/to?http://{named}/image", f"http://{named}")
    assert server.asked == [f"/to?http://{named}/image"]


def test_errors_and_incomplete_or_large_answers_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the server answers 404"):
        size_at(server, "/missing")
    with pytest.raises(DataError, match="the answer is incomplete"):
        size_at(server, "/cut")
    monkeypatch.setattr("cepo.data.images.LARGEST_DOWNLOAD", 20)
    with pytest.raises(DataError, match="it has more than 20 bytes"):
        size_at(server, "/image")


def test_a_server_that_sends_byte_by_byte_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.foreign_files._DOWNLOAD_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0\.5 s|the answer is incomplete"):
        size_at(server, "/slow")
    assert time.monotonic() - began < 10
