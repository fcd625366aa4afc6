"""A model folder of a stranger is loaded or refused by one message: no traceback, no file from elsewhere, no long wait."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cepo.errors import CepoError, ConfigError
from cepo.microgeo.world import ASSETS
from cepo.models.pretrained import load_model
from cepo.models.processing import Processing

Change = Callable[[Path], object]


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text("utf-8")))))


def sizes(section: str, **entries: Any) -> Change:
    return changed("config.json", lambda tree: tree | {section: tree[section] | entries})


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Puts what `make` makes in the place of a file."""
    return lambda folder: ((folder / name).unlink(missing_ok=True), make(folder / name))


def link(name: str, target: str) -> Change:
    return instead(name, lambda file: file.symlink_to(target))


def pipe(name: str) -> Change:
    return instead(name, os.mkfifo)


def index(content: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return apply


HOSTILE: dict[str, Change] = {
    "a deep config": text("config.json", "[" * 100_000),
    "a config that is a list": text("config.json", "[]"),
    "a number of 10,000 digits": text("config.json", '{"vocab_size": ' + "9" * 10_000 + "}"),
    "a tokenizer without added_tokens": changed("tokenizer.json", lambda tree: tree.pop("added_tokens") and tree),
    "an empty tokenizer": text("tokenizer.json", "{}"),
    "a deep tokenizer": text("tokenizer.json", "[" * 100_000),
    "a negative vocabulary": sizes("text_config", vocab_size=-1),
    "a vocabulary of text": sizes("text_config", vocab_size="many"),
    "no heads": sizes("text_config", num_attention_heads=0),
    "10^7 layers": sizes("text_config", num_hidden_layers=10**7),
    "10^7 layers of the tower": sizes("vision_config", depth=10**7),
    "a vocabulary of 10^15": sizes("text_config", vocab_size=10**15),
    "a pipe for a config": pipe("config.json"),
    "a pipe for a tokenizer": pipe("tokenizer.json"),
    "a pipe for a template": pipe("chat_template.jinja"),
    "a device for a config": link("config.json", "/dev/zero"),
    "a device for a template": link("chat_template.jinja", "/dev/zero"),
    "a template from elsewhere": link("chat_template.jinja", "../secret.txt"),
    "an index that leads out": index(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}})),
    "a deep index": index("[" * 100_000),
    "a pipe for weights": pipe("model.safetensors"),
    "a processor of text": text("processor_config.json", '"text"'),
    "a pipe for a processor": pipe("processor_config.json"),
}  # fmt: skip


def load(folder: Path) -> None:
    Processing(str(folder))
    load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    (tmp_path / "secret.txt").write_text("s3cret {{ messages }}", encoding="utf-8")
    HOSTILE[name](folder)
    with pytest.raises(CepoError) as caught:
        load(folder)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x", "a/b"])
def test_a_template_whose_name_is_a_path_is_written_nowhere(tmp_path: Path, name: str) -> None:
    folder, out = tmp_path / "model", tmp_path / "a" / "b" / "out"
    shutil.copytree(ASSETS, folder)
    out.mkdir(parents=True)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": template}, {"name": name, "template": "x"}]
    changed("tokenizer_config.json", lambda tree: tree | {"chat_template": templates})(folder)
    before = sorted(path for path in tmp_path.rglob("*") if out not in path.parents)
    words = r"tokenizer and processor of .* cannot be written|which leads out of the folder"
    with pytest.raises(ConfigError, match=words):
        Processing(str(folder)).save(out)
    assert sorted(path for path in tmp_path.rglob("*") if out not in path.parents) == before
