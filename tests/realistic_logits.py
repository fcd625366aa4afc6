"""The tiny checkpoint with logits as large as those of trained models: from 16 to 32 bf16 knows multiples of 0.125 alone."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from generator_cases import reference_model
from safetensors.torch import load_file, save_file

LIKELIEST_LOGIT = 24.0
"""Mean, over tokens, of the largest logit."""

_FINAL_NORM = "model.language_model.norm.weight"


def with_realistic_logits(folder: Path, target: Path) -> Path:
    """A copy of the checkpoint in which the norm before the head is scaled."""
    copytree(folder, target)
    model: Any = reference_model(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(200)[None]).logits[0]
    tensors = load_file(target / "model.safetensors")
    tensors[_FINAL_NORM] = tensors[_FINAL_NORM] * (LIKELIEST_LOGIT / logits.amax(dim=1).mean())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
