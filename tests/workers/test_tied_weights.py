"""A head that is tied to the embeddings is in a checkpoint once if it is trained, and not at all if it is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actors import build_actor, differing, parameters_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cepo.errors import CheckpointError
from cepo.microgeo.world import ASSETS
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import SHARDS, Shards, load_state, load_weights, save_state, trained_state, write_shards
from cepo.workers.merged_model import BaseModel, merge_checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

EMBEDDINGS = "model.model.model.language_model.embed_tokens.weight"


def actor_of(rank: int, *, moved: bool = False) -> Actor:
    """The embedded model, tied, with an adapter of this rank; `moved` changes every trained weight."""
    actor = build_actor(Path(ASSETS), model__lora__rank=rank)
    if moved:
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in actor.module.parameters():
                if parameter.requires_grad:
                    parameter.to_local().add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return actor


def stored(folder: Path) -> dict[str, Tensor]:
    shards = Shards(folder / SHARDS)
    tensors = {name: torch.zeros(shape) for name, shape in shards.shapes.items()}
    shards.fill(tensors)
    return tensors


@pytest.mark.heavy
@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "all weights"])
def test_a_tied_head_is_left_out(rank: int, tmp_path: Path) -> None:
    """Resuming and reading weights alone give the head of the embeddings, and so does merging."""
    actor = actor_of(rank, moved=True)
    save_state(actor, tmp_path / "saved")
    names = [name for name in stored(tmp_path / "saved") if "lm_head" in name or "embed_tokens" in name]
    assert [name for name in names if name.startswith("model.")] == ([] if rank else [EMBEDDINGS])
    for load in (load_state, load_weights):
        restored = actor_of(rank)
        load(restored, tmp_path / "saved")
        assert differing(parameters_of(restored), parameters_of(actor)) == []
        head_weight, embeddings = _tied_pair(restored)
        assert torch.equal(head_weight, embeddings), "the head follows the embeddings"
    merge_checkpoint(tmp_path / "saved", tmp_path / "merged", BaseModel(path=str(ASSETS)))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    head_weight, embeddings = _tied_pair(actor)
    assert torch.equal(
        merged["model.language_model.embed_tokens.weight"],
        embeddings.to(merged["model.language_model.embed_tokens.weight"]),
    )


def _tied_pair(actor: Actor) -> tuple[Tensor, Tensor]:
    named = dict(actor.module.named_parameters(remove_duplicate=False))
    pair = [weight.full_tensor() for name, weight in named.items() if "lm_head" in name or "embed_tokens" in name]
    return pair[0], pair[1]


def test_any_tensor_more_is_refused(tmp_path: Path) -> None:
    """Such as a tied head, which the embeddings stand for."""
    save_state(actor_of(4), tmp_path / "saved")
    tensors = stored(tmp_path / "saved")
    notes = Shards(tmp_path / "saved" / SHARDS).notes[0]
    tensors["model.model.base_model.model.lm_head.weight"] = torch.zeros(500, 128)
    write_shards(tensors, tmp_path / "more" / SHARDS, notes)
    with pytest.raises(CheckpointError, match=r"1 tensors differ, such as .*lm_head"):
        load_state(actor_of(4), tmp_path / "more")


def test_a_2b_models_adapter_takes_70_mb_without_its_head() -> None:
    """Qwen3-VL-2B's shape: 17,432,576 numbers of rank 16, and not the 151,936 x 2,048 of the head (0.62 GB in bf16)."""
    text = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision | {"deepstack_visual_indexes": [5, 11, 17]}, tie_word_embeddings=True
    )
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    model.tie_weights()
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", exclude_modules=".*visual.*")
    state = trained_state(get_peft_model(model, settings))
    assert all(".lora_" in name for name in state)
    assert sum(tensor.numel() for tensor in state.values()) == 17_432_576
