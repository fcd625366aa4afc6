"""A head that is tied to the embeddings is in a checkpoint once if it is trained, and not at all if it is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from actors import build_actor, parameters_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cepo.errors import CheckpointError
from cepo.microgeo.world import ASSETS
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import SHARDS, Shards, load_state, load_weights, save_state, trained_state, write_shards
from cepo.workers.distributed import data_parallel_mesh
from cepo.workers.merged_model import BaseModel, merge_checkpoint

EMBEDDINGS = "model.model.model.language_model.embed_tokens.weight"


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    data_parallel_mesh(-1)
    yield
    dist.destroy_process_group()


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


def as_written_before(folder: Path, older: Path, head: str) -> None:
    """Copies a checkpoint and adds the head, 500 x 128, as earlier versions stored it beside the trained weights."""
    tensors, notes = stored(folder), Shards(folder / SHARDS).notes[0]
    embeddings = tensors.get(EMBEDDINGS)
    tensors[head] = torch.zeros(500, 128) if embeddings is None else embeddings.clone()
    write_shards(tensors, older / SHARDS, notes)
    for file in sorted((folder / "lora_adapter").glob("*")):
        (older / "lora_adapter").mkdir(exist_ok=True)
        (older / "lora_adapter" / file.name).write_bytes(file.read_bytes())


CASES = [(4, "model.model.base_model.model.lm_head.weight"), (0, "model.model.lm_head.weight")]


@pytest.mark.heavy
@pytest.mark.parametrize(("rank", "head"), CASES, ids=["adapter", "all weights"])
def test_a_tied_head_is_left_out_and_old_checkpoints_are_read(rank: int, head: str, tmp_path: Path) -> None:
    """Resuming, reading weights alone and merging give the same from a checkpoint with the head and from one without."""
    actor = actor_of(rank, moved=True)
    save_state(actor, tmp_path / "new")
    names = [name for name in stored(tmp_path / "new") if "lm_head" in name or "embed_tokens" in name]
    assert [name for name in names if name.startswith("model.")] == ([] if rank else [EMBEDDINGS])
    as_written_before(tmp_path / "new", tmp_path / "old", head)
    for folder in ("new", "old"):
        for load in (load_state, load_weights):
            restored = actor_of(rank)
            load(restored, tmp_path / folder)
            assert all(
                torch.equal(weight, parameters_of(restored)[name]) for name, weight in parameters_of(actor).items()
            )
            head_weight, embeddings = _tied_pair(restored)
            assert torch.equal(head_weight, embeddings), "the head follows the embeddings"
        merge_checkpoint(tmp_path / folder, tmp_path / f"merged {folder}", BaseModel(path=str(ASSETS)))
    new, old = (load_file(tmp_path / f"merged {folder}" / "model.safetensors") for folder in ("new", "old"))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in new)


def _tied_pair(actor: Actor) -> tuple[Tensor, Tensor]:
    named = dict(actor.module.named_parameters(remove_duplicate=False))
    pair = [weight.full_tensor() for name, weight in named.items() if "lm_head" in name or "embed_tokens" in name]
    return pair[0], pair[1]


def test_any_other_tensor_more_is_refused(tmp_path: Path) -> None:
    save_state(actor_of(4), tmp_path / "new")
    as_written_before(tmp_path / "new", tmp_path / "old", "model.model.base_model.model.other_head.weight")
    with pytest.raises(CheckpointError, match=r"1 tensors differ, such as .*other_head"):
        load_state(actor_of(4), tmp_path / "old")


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
