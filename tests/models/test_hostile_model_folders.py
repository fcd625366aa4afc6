"""A model folder of a stranger runs no code, reads no other file, opens no host and writes nowhere; it may waste time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import json_files
import pytest
import torch
from case_files import cases
from safetensors.torch import load_file, save_file

from cepo.errors import CepoError, ConfigError, EngineError
from cepo.microgeo.world import ASSETS
from cepo.models.pretrained import load_model
from cepo.models.processing import Processing

Change = Mapping[str, Any]


HOSTILE: dict[str, Change] = cases(__file__, "hostile_model_folders.yaml")
FAULTY: dict[str, Change] = cases(__file__, "faulty_model_folders.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(ASSETS, tmp_path / "model")


def apply(change: Change, folder: Path, secret: Path) -> None:
    """Makes a change of a table, see the head of `hostile_model_folders.yaml`."""
    if "remove" in change:
        (folder / change["remove"]).unlink()
    for name, entries in change.get("set", {}).items():
        file = folder / name
        json_files.merge(file, entries)
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("SECRET", str(secret)), encoding="utf-8")
    for name, text in change.get("text", {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, target in change.get("link", {}).items():
        file = folder / name
        file.unlink(missing_ok=True)
        file.symlink_to(target.replace("SECRET", str(secret)))
    if "pipe" in change:
        file = folder / change["pipe"]
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    if "deep" in change:
        (folder / change["deep"]).write_text("[" * 100_000, encoding="utf-8")
    if "many" in change:
        entries = {f"k{number}": 1 for number in range(10_000)}
        json_files.merge(folder / change["many"], entries)


def load(folder: Path) -> Processing:
    processing = Processing(str(folder))
    load_model(
        str(folder),
        dtype=torch.float32,
        trust_remote_code=False,
        override_config={},
    )
    return processing


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_folder_is_refused(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The message names the file and the entry, and nothing of another file."""
    secret = folder.parent / "secret.txt"
    secret.write_text("s3cret {{ messages }}", encoding="utf-8")
    apply(HOSTILE[name], folder, secret)
    with pytest.raises(CepoError, match=HOSTILE[name]["refused"]) as caught:
        load(folder)
    assert isinstance(caught.value, ConfigError | EngineError)
    assert "s3cret" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_model_folder_gives_at_most_one_message(folder: Path, name: str) -> None:
    apply(FAULTY[name], folder, folder)
    words = FAULTY[name].get("refused")
    if words is None:
        load(folder)
        return
    with pytest.raises(CepoError, match=words):
        load(folder)


def files_outside(out: Path, folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if out not in path.parents)


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x", "a/b"])
def test_a_template_whose_name_is_a_path_is_written_nowhere(folder: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "a" / "b" / "out"
    out.mkdir(parents=True)
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8")
    file.unlink()
    templates = [
        {"name": "default", "template": template},
        {"name": name, "template": "x"},
    ]
    json_files.merge(folder / "tokenizer_config.json", {"chat_template": templates})
    files_before = files_outside(out, tmp_path)
    words = r"tokenizer and processor of .* cannot be written|which leads out of the folder"
    with pytest.raises(ConfigError, match=words):
        Processing(str(folder)).save(out)
    assert files_outside(out, tmp_path) == files_before


NORM = "model.language_model.norm.weight"


def change_weights(folder: Path, **changed: torch.Tensor | None) -> None:
    """Writes other tensors, and leaves out those that are None."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changed.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_missing_weight_is_not_drawn_at_random(folder: Path) -> None:
    change_weights(folder, **{NORM: None})
    with pytest.raises(EngineError, match=rf"lack weights of the model: 1 \({NORM}\)"):
        load(folder)


def test_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    change_weights(folder, **{NORM: torch.ones(2)})
    with pytest.raises(EngineError, match="cannot be loaded"):
        load(folder)


def test_a_weight_too_many_is_named_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as the head of a model that a folder once was."""
    change_weights(folder, **{"score.weight": torch.ones(1, 128)})
    load(folder)
    assert "score.weight" in caplog.text


def test_a_token_beyond_the_embeddings_is_named(folder: Path) -> None:
    """The forward pass would end in an index error. Such a token is only an error where a text has it."""
    tree = json_files.read(folder / "tokenizer.json")
    model = tree["model"]
    model["vocab"]["\u00c3\u00bc"] = 700
    model["merges"].append(["\u00c3", "\u00bc"])
    json_files.write(folder / "tokenizer.json", tree)
    processing = Processing(str(folder))
    assert processing.encode_text("2 + 3")
    assert max(processing.banned_token_ids) < 500
    with pytest.raises(ConfigError, match=r"a token 700, and the model has embeddings of 500 tokens"):
        processing.encode_text("ü")


def test_where_a_folder_once_was_is_no_path(folder: Path) -> None:
    """Published folders name the machines that wrote them, and tokens that look like paths."""
    of_model = {
        "_name_or_path": "/fsx/model",
        "text_config._name_or_path": "../model",
    }
    of_tokenizer = {
        "name_or_path": "/fsx/model",
        "special_tokens_map_file": "/fsx/x.json",
        "model_max_length": 1e30,
    }
    json_files.merge(folder / "config.json", of_model)
    json_files.merge(folder / "tokenizer_config.json", of_tokenizer)
    processing = load(folder)
    assert processing.encode("Count.", processing.load_images([])).token_ids
