"""Tiny checkpoints that say what a test wants, and whose files declare other ends of a response than their chat template."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import json_files


def declare_end(folder: Path, text: str) -> None:
    """Writes one token as the only end of a response into all files, as those of base models say."""
    added = json_files.read(folder / "tokenizer.json")["added_tokens"]
    (token_id,) = [token["id"] for token in added if token["content"] == text]
    for name in ("config.json", "generation_config.json"):
        json_files.merge(folder / name, {"eos_token_id": token_id})
    json_files.merge(folder / "tokenizer_config.json", {"eos_token": text})


def say(folder: Path, token_ids: Sequence[int]) -> None:
    """Writes weights by which each of the tokens follows the one before it, with a probability above 0.99."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(1.0)
    shape = weights["model.embed_tokens.weight"].shape
    generator = torch.manual_seed(0)
    embeddings = torch.randn(shape, generator=generator)
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    head = torch.zeros_like(embeddings)
    for token, next_token in itertools.pairwise(token_ids):
        head[next_token] += 5.0 * embeddings[token]
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"] = head
    save_file(weights, file, metadata={"format": "pt"})
    json_files.merge(folder / "config.json", {"tie_word_embeddings": False})
