"""Published folders of the supported families pass the checks without trust, with the oddities that they have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from case_files import cases
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_checkpoint
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from cepo.microgeo.world import ASSETS
from cepo.models.folder_check import check_model_folder
from cepo.models.pretrained import load_model
from cepo.models.processing import Processing

FAMILIES: dict[str, dict[str, Any]] = cases(__file__, "honest_model_folders.yaml")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_folder_needs_no_trust(tmp_path: Path, name: str) -> None:
    for file, tree in FAMILIES[name].items():
        (tmp_path / file).write_text(json.dumps(tree), encoding="utf-8")
    check_model_folder(str(tmp_path))


def test_files_that_nothing_reads_are_left_alone(tmp_path: Path) -> None:
    """Published folders have cards, licences, old forms of the tokenizer, and weights of other programs."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text('{"dim": "/etc"}', encoding="utf-8")
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    for name in ("README.md", "LICENSE", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "tokenizer.model"):
        (folder / name).write_bytes(b"x")
    (folder / "trainer_state.json").write_text('{"best_model_checkpoint": "/tmp/x"}', encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def published_text_model(folder: Path) -> Path:
    return write_checkpoint("qwen2", folder / "model")


def test_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    """A folder of a tokenizer alone, from which the weights were left out, although its index names them."""
    folder = published_text_model(tmp_path)
    (folder / "model.safetensors").unlink()
    names = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names), encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def test_a_tokenizer_may_have_its_older_form(tmp_path: Path) -> None:
    """A vocabulary and a list of merges in place of `tokenizer.json`."""
    folder = published_text_model(tmp_path)
    expected = Processing(str(folder)).encode_text("2 + 3 = 5")
    file = folder / "tokenizer.json"
    model = json.loads(file.read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2"]
    for merge in model["merges"]:
        lines.append(" ".join(merge))
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    file.unlink()
    assert Processing(str(folder)).encode_text("2 + 3 = 5") == expected


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "NFKC"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"(\w+|\s)+?"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 40}},
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    ],
)
def test_a_tokenizer_of_any_parts_needs_no_trust(tmp_path: Path, part: dict[str, Any]) -> None:
    folder = published_text_model(tmp_path)
    tree = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(tree | part), encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def test_mistrals_own_tokenizer_may_lie_beside_the_common_one(tmp_path: Path) -> None:
    folder = published_text_model(tmp_path)
    expected = Processing(str(folder)).encode_text("2 + 3")
    (folder / "tekken.json").write_text("{}", encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3") == expected


def test_an_index_may_name_a_tied_head(tmp_path: Path) -> None:
    """Some programs list `lm_head.weight` and store the embeddings alone; transformers ties them."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    tensors = load_file(folder / "model.safetensors")
    places = dict.fromkeys([*tensors, "lm_head.weight"], "model-00001-of-00001.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    model: Any = load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_qwen_weights_of_the_old_names_are_loaded(tmp_path: Path) -> None:
    """Published Qwen2.5-VL checkpoints have `visual.*` and `model.layers.*`, without a part for the language model."""
    rotations = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tower = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
    tokens: dict[str, Any] = {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    config = Qwen2_5_VLConfig(
        text_config=text
        | {"num_key_value_heads": 2, "rope_parameters": rotations}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config=tower | {"fullatt_block_indexes": [1]},
        **tokens,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.save_pretrained(tmp_path)
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): weight.clone()
        for name, weight in model.state_dict().items()
    }
    old["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), dtype=torch.float32, trust_remote_code=False, override_config={})
    weights = list(model.state_dict().values())
    for weight, loaded_weight in zip(weights, loaded.state_dict().values(), strict=True):
        assert torch.equal(weight, loaded_weight)


def test_code_beside_a_supported_model_is_not_run(tmp_path: Path) -> None:
    """Phi-3 has an `auto_map` and modules, for versions of transformers without its classes."""
    folder = tmp_path / "model"
    trace = tmp_path / "it_ran"
    shutil.copytree(ASSETS, folder)
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoTokenizer")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = dict.fromkeys([*names, "AutoProcessor", "AutoImageProcessor"], "modeling_x.X")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modeling_x.py").write_text(f"import os\nos.mkdir({str(trace)!r})\nclass X: ...\n", encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")
    model = load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})
    assert type(model).__module__.startswith("transformers.models.")
    assert not trace.exists()
