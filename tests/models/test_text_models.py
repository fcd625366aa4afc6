"""Prompts and the adapter of a text-only model (Qwen3); tests/runs/test_families.py trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_checkpoint

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.errors import DataError
from cepo.models.processing import Processing


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("text-model"))


def test_ids_beyond_the_tokenizers_are_banned(text_model: Path) -> None:
    processing = Processing(str(text_model))
    size, padded = len(processing.tokenizer), json.loads((text_model / "config.json").read_text())["vocab_size"]
    assert size < padded
    assert set(range(size, padded)) <= set(processing.banned_token_ids)


def test_a_picture_for_a_text_model_is_refused_with_its_row(text_model: Path, tmp_path: Path) -> None:
    from PIL import Image

    image, file = tmp_path / "a.png", tmp_path / "rows.jsonl"
    Image.new("RGB", (64, 64)).save(image)
    questions: dict[str, list[str]] = {"1 + 1?": [], "<image>How long?": [str(image)]}
    rows = [{"problem": text, "images": images, "answer": "2"} for text, images in questions.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"row 1: the row has images, but the model's folder has no image processor"):
        ProblemSet(str(file), DataConfig(train_files=str(file), prompt_key="problem"), Processing(str(text_model)))


@pytest.mark.heavy
@pytest.mark.filterwarnings("error:You have passed exclude_modules")
def test_a_text_models_default_adapter_warns_0_times(text_model: Path) -> None:
    from transformers import Qwen3ForCausalLM

    from cepo.config.worker_schema import LoraConfig
    from cepo.workers.adapters import add_adapter

    model: Any = Qwen3ForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    wrapped = add_adapter(model, LoraConfig(rank=2), dtype=torch.float32, seed=1)
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 2 * 7
