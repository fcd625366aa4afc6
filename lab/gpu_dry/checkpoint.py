"""Writes checkpoint folders with a published model's sizes and without weights."""

from __future__ import annotations

import json
from pathlib import Path

from lab.support.shapes import SHAPES, model_config

IDS_WITHOUT_TOKEN = 267
"""The embeddings of Qwen3-VL beyond its tokenizer's last id."""


def write_configuration(shape: str, folder: Path) -> None:
    """Writes a checkpoint folder without weights, whose tokenizer has almost as many tokens as the model has embeddings."""
    from lab.worlds.model import build_processor
    from lab.worlds.tokenizer import build_tokenizer

    sizes = SHAPES[shape]
    config = model_config(sizes)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    build_processor(build_tokenizer()).save_pretrained(folder)
    lengthen_tokenizer(folder / "tokenizer.json", sizes.vocabulary - IDS_WITHOUT_TOKEN)


def lengthen_tokenizer(file: Path, size: int) -> None:
    """Adds tokens that no text has until there are `size`, because vLLM bans at most 1,024 ids."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    for token in content["added_tokens"]:
        # transformers numbers an added token that is not in the vocabulary anew, behind all others.
        vocabulary[token["content"]] = token["id"]
    taken = set(vocabulary.values())
    for number in range(size):
        if number not in taken:
            vocabulary[f"unused-{number}"] = number
    file.write_text(json.dumps(content), encoding="utf-8")
