"""Tiny checkpoints that say what a test wants, and whose files declare other ends of a response than their chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path


def declare_end(folder: Path, text: str) -> None:
    """Writes one token as the only end of a response into all files, as those of base models say."""
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    token_id = next(token["id"] for token in added if token["content"] == text)
    entries = {
        "config.json": ("eos_token_id", token_id),
        "generation_config.json": ("eos_token_id", token_id),
        "tokenizer_config.json": ("eos_token", text),
    }
    for name, (key, value) in entries.items():
        tree = json.loads((folder / name).read_text(encoding="utf-8"))
        tree[key] = value
        (folder / name).write_text(json.dumps(tree), encoding="utf-8")


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
    embeddings = torch.randn(weights["model.embed_tokens.weight"].shape, generator=torch.manual_seed(0))
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    head = torch.zeros_like(embeddings)
    for token, next_token in itertools.pairwise(token_ids):
        head[next_token] += 5.0 * embeddings[token]
    weights["model.embed_tokens.weight"] = embeddings
    weights["lm_head.weight"] = head
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
