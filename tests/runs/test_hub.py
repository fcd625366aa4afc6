"""Checkpoints and merged models on the hub, by the hub's own client, against a server of our own with the hub's form."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_runs import differing, run

import cepo
from cepo.cli import main

LORA = ["worker.actor.model.lora.rank=4", "trainer.save_freq=1", "trainer.save_limit=-1"]


class Hub:
    """What was published: the files of each repository, and whether it was created as private."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": "https://huggingface.co/someone/model", "name": "someone/model", "id": "1"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if path == "/api/validate-yaml":
            assert yaml.safe_load(json.loads(body)["content"].split("---\n")[1])["library_name"]
            return {}
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": "https://huggingface.co/someone/model/commit/1", "commitOid": "1", "success": True}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.keys.add(self.headers.get("Authorization"))
            reply = found.answer(self.path, self._body())
            self._send(json.dumps(reply).encode())

        def do_GET(self) -> None:
            self._send(json.dumps({"type": "user", "name": "someone", "id": "someone/model", "sha": "1"}).encode())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Stays silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{server.server_port}")
    yield found
    server.shutdown()
    server.server_close()


@pytest.mark.heavy
def test_checkpoint_and_merged_model_have_cards_and_resume(tiny_run: list[str], tmp_path: Path, hub: Hub) -> None:
    """The second step after a download of the first's checkpoint ends with the weights of the run that never stopped.

    The model that is merged from the checkpoint is published with a card of its own.
    """
    whole = run(tiny_run, *LORA, folder=tmp_path / "whole")
    address = cepo.push(tmp_path / "whole" / "global_step_1", "someone/model")
    assert address == "https://huggingface.co/someone/model/commit/1"
    assert [each["visibility"] for each in hub.created] == ["private"]
    assert hub.keys == {"Bearer hf_of_a_test"}
    assert {"README.md", "curves.png", "config.yaml", "adapter_config.json", "adapter_model.safetensors"} <= set(
        hub.files
    )
    _, front, text = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "tags": ["cepo", "reinforcement-learning", "grpo"]}
    for title in ("Data", "Settings", "Curve", "Run", "Versions"):
        assert f"## {title}\n" in text
    assert "after step 1" in text
    assert "| algorithm.adv_estimator | grpo |" in text
    assert str(tmp_path) not in text
    for name, content in hub.files.items():
        (tmp_path / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    again = f"trainer.load_checkpoint_path={tmp_path / 'downloaded' / 'global_step_1'}"
    resumed = run(tiny_run, *LORA, again, folder=tmp_path / "resumed")
    assert resumed.first_step == 1
    assert differing(resumed.parameters, whole.parameters) == []
    hub.files.clear()
    merge = ["merge", "--checkpoint", str(tmp_path / "whole" / "global_step_1"), "--out", str(tmp_path / "merged")]
    assert main([*merge, "--upload", "someone/model"]) == 0
    assert {"README.md", "config.json", "model.safetensors"} <= set(hub.files)
    assert "library_name: transformers" in hub.files["README.md"].decode()
