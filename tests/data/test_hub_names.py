"""Names on the hub are asked for once: an answer, what the cache has, or an error in seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from local_server import local_server

from cepo.data.hub import require_hub_names
from cepo.data.tables import read_source
from cepo.errors import ConfigError

MODEL = ("worker.actor.model.model_path", "org/model")
DATA = ("data.train_files", "org/problems@train")


@pytest.fixture(autouse=True)
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_DATASETS_CACHE", "HTTPS_PROXY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    constants = {"HF_HUB_OFFLINE": False, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    return tmp_path


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{probe.getsockname()[1]}")


def refuse(request: BaseHTTPRequestHandler) -> None:
    request.send_response(404 if "missing" in request.path else 403)
    request.send_header("X-Error-Code", "RepoNotFound" if "missing" in request.path else "Other")
    request.end_headers()


@pytest.fixture
def answering_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with local_server(refuse) as host:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
        yield


@pytest.mark.usefixtures("answering_hub")
def test_a_hub_that_answers_is_left_to_its_own_libraries() -> None:
    require_hub_names([MODEL], [DATA])
    with pytest.raises(ConfigError, match=r"data\.val_files=org/missing: .* has no such dataset \(404 "):
        require_hub_names([MODEL], [DATA, ("data.val_files", "org/missing@test")])


@pytest.mark.usefixtures("closed_port")
def test_a_name_that_hub_and_cache_lack_ends_in_seconds(hub_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Earlier downloads are used; local paths and the built-in toy task are no names."""
    (hub_home / "model").mkdir()
    local = [("a", str(hub_home / "model")), ("b", "microgeo:model"), ("c", None)]
    require_hub_names(local, [("d", f"{hub_home}/model@train"), ("e", "microgeo:train")])
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        require_hub_names([MODEL], [DATA])
    assert time.monotonic() - start < 60  # the hub library's own retries take minutes
    parts = ("worker.actor.model.model_path=org/model", "refused", str(hub_home / "hub"), "HTTPS_PROXY")
    assert [part for part in parts if part not in str(caught.value)] == []
    (hub_home / "hub" / "models--org--model").mkdir(parents=True)
    (hub_home / "hub" / "datasets--org--problems").mkdir(parents=True)
    require_hub_names([MODEL], [DATA])
    assert caplog.text.count("using the earlier download") == 2


def test_under_hf_hub_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.train_files=org/problems: .* offline mode is enabled"):
        require_hub_names([], [DATA])


def test_reading_a_local_file_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[object] = []

    def look_up(host: object, *_: object, **__: object) -> None:
        hosts.append(host)
        raise OSError("no network")

    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)  # the library's default
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    assert len(read_source(str(tmp_path / "rows.jsonl"))) == 1
    assert hosts == []
