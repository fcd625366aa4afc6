"""Writes checkpoint folders with a published model's sizes and without weights."""

from __future__ import annotations

from pathlib import Path

from lab.gpu_dry.published import PUBLISHED, write_published
from testing.shapes import SHAPES, full_length_tokenizer, model_config


def write_configuration(shape: str, folder: Path) -> None:
    """Writes a checkpoint folder without weights, with a tokenizer of the model's length."""
    from lab.worlds.model import build_processor

    sizes = SHAPES[shape]
    config = model_config(sizes)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    build_processor(full_length_tokenizer(sizes)).save_pretrained(folder)


def write_model(name: str, folder: Path) -> None:
    """Writes the checkpoint folder of a model of `SHAPES` or `PUBLISHED`, without weights."""
    if name in PUBLISHED:
        write_published(name, folder)
    else:
        write_configuration(name, folder)
