"""The shipped toy checkpoint's tokenizer, processor and configuration, and checkpoints with random weights of that form."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.microgeo.world import ASSETS

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLProcessor


def toy_tokenizer() -> Qwen2Tokenizer:
    """Returns the byte-level BPE of about 500 tokens, with Qwen's special tokens."""
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(ASSETS)


def toy_config() -> Qwen3VLConfig:
    """Returns the configuration of 1.3 million parameters, with the tokenizer's size and special ids."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig.from_pretrained(ASSETS)


def toy_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """Returns the shipped processor with another tokenizer."""
    from transformers import Qwen3VLProcessor

    processor: Any = Qwen3VLProcessor.from_pretrained(ASSETS)
    processor.tokenizer = tokenizer
    return processor


def write_untrained_checkpoint(folder: Path, *, seed: int) -> Path:
    """Writes a checkpoint folder with random weights, the tokenizer, the processor and the generation config.

    transformers and vLLM can read the folder. The same seed gives the same files.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    shutil.copytree(ASSETS, folder, dirs_exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(toy_config()).float()
    model.generation_config = GenerationConfig.from_pretrained(ASSETS)
    model.save_pretrained(folder)
    return folder
