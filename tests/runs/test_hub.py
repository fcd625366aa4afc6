from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_server import local_server
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

    def reply(self, path: str, body: bytes) -> dict[str, Any]:
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

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        reply: dict[str, Any] = {"type": "user", "name": "someone", "id": "someone/model", "sha": "1"}
        if request.command == "POST":
            self.keys.add(request.headers.get("Authorization"))
            reply = self.reply(request.path, body_of(request))
        content = json.dumps(reply).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    parts = []
    while size := int(request.rfile.readline(), 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    with local_server(found.answer) as address:
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://{address}")
        yield found


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
    assert hub.files.keys() >= {
        "README.md",
        "curves.png",
        "config.yaml",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    _, front, text = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "tags": ["cepo", "reinforcement-learning", "grpo"]}
    titles = [f"## {title}\n" for title in ("Data", "Settings", "Curve", "Run", "Versions")]
    assert all(each in text for each in [*titles, "after step 1", "| algorithm.adv_estimator | grpo |"])
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
