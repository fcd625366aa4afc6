"""Merged weights take the shapes of published checkpoints, and those that do not fit their base are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cepo.errors import CheckpointError
from cepo.models.families import Qwen3VLMoe
from cepo.workers.merged_model import _publish, _require_none


def test_a_file_of_experts_alone_is_transposed_and_others_kept(tmp_path: Path) -> None:
    layer = "model.language_model.layers.0"
    experts = {f"{layer}.mlp.experts.gate_up_proj": torch.randn(2, 3, 4)}
    attention = {f"{layer}.self_attn.q_proj.weight": torch.randn(3, 4)}
    for file, weights in (("1.safetensors", experts), ("2.safetensors", attention)):
        save_file(weights, tmp_path / file, metadata={"format": "pt"})
    _publish(tmp_path, Qwen3VLMoe(title="experts", model_types=()))
    for file, weights, shape in (("1.safetensors", experts, (2, 4, 3)), ("2.safetensors", attention, (3, 4))):
        ((name, weight),) = weights.items()
        ((published, published_weight),) = load_file(tmp_path / file).items()
        assert published == name
        assert published_weight.shape == shape
        assert torch.equal(
            published_weight if published_weight.shape == weight.shape else published_weight.transpose(1, 2), weight
        )


@pytest.mark.parametrize(("names", "shown"), [("cab", r"3 \(a, b, c\);"), ("dcab", r"4 \(a, b, c, \.\.\.\);")])
def test_a_refusal_names_3_weights_and_counts_all(names: str, shown: str) -> None:
    with pytest.raises(CheckpointError, match=f"the folder lacks weights: {shown}"):
        _require_none(names, "the folder lacks weights")
    _require_none("", "the folder lacks weights")
