"""Tiny checkpoint folders with random weights, one for each model family, in the form of the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_checkpoints import others, qwen
from tiny_checkpoints.published import publish

TEXT_FAMILIES = ("qwen2", "qwen3")
_BUILDERS = qwen.FAMILIES | others.FAMILIES
FAMILIES = tuple(_BUILDERS)
VISION_FAMILIES = tuple(family for family in FAMILIES if family not in TEXT_FAMILIES)


def write_checkpoint(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights, tokenizer, chat template, processor and generation config of a tiny model.

    The folder can be read by transformers' Auto classes and by vLLM. The weights are large enough that the model's
    distributions are not flat and depend on the image. `family` is the configuration's `model_type`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    parts = _BUILDERS[family]()
    tokenizer = getattr(parts.processor, "tokenizer", parts.processor)
    auto: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(parts.config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config = GenerationConfig(
        do_sample=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in parts.end_tokens],
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    parts.processor.save_pretrained(folder)
    publish(folder, parts)
    return folder
