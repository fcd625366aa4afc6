"""Saves and restores a worker's state in safetensors files, and the adapter in PEFT's format."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from cepo.errors import CheckpointError
from cepo.models.quantization import write_quantization
from cepo.workers.actor import Actor
from cepo.workers.critic import Critic
from cepo.workers.shards import load_shards, write_shards

SHARDS = "distributed"
ADAPTER = "lora_adapter"
_TRAINED = StateDictOptions(strict=False, ignore_frozen_params=True)


def save_state(worker: Actor | Critic, folder: Path, *, weights_only: bool = False) -> None:
    """Saves sharded trainable weights, optimizer and teacher weights, the random state and, under LoRA, the adapter.

    With `weights_only`, only the trainable weights and the adapter are written, and no run can resume from them.
    Collective: all ranks write to one folder on shared storage, which is complete when all have returned.
    """
    tensors = _tensors(_weights(worker) if weights_only else _state(worker))
    adapted = worker if isinstance(worker, Actor) and worker.has_adapter else None
    adapter = None if adapted is None else adapted.adapter_weights()  # collective, so before a write can fail
    write_shards(tensors, folder / SHARDS, {} if weights_only else {"random": _random_state()})
    worker.offload_optimizer()
    if adapted is not None and adapter is not None and dist.get_rank() == 0:
        adapter.write(folder / ADAPTER)
        write_quantization(adapted.module.base, folder / ADAPTER)


def load_state(worker: Actor | Critic, folder: Path) -> None:
    """Restores a checkpoint of `save_state` on any number of ranks; a rank without a saved random state uses rank 0's.

    Raises `CheckpointError`: files are missing or damaged, or belong to another model, adapter or teacher.
    """
    state = _state(worker)
    notes = load_shards(_tensors(state), folder / SHARDS).notes
    set_state_dict(
        worker.module,
        worker.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_TRAINED,
    )
    # The moments come from the checkpoint; their settings come from the resumed run, which sets the learning rate later.
    for group in worker.optimizer.param_groups:
        group.update(worker.optimizer.defaults)
    worker.offload_optimizer()
    try:
        _set_random_state(notes[dist.get_rank() if dist.get_rank() < len(notes) else 0]["random"])
    except Exception as error:  # the random state of a stranger can be anything
        raise CheckpointError(f"{folder} has no valid random state ({error}); give another checkpoint") from error


def load_weights(worker: Actor | Critic, folder: Path) -> None:
    """Restores only the trained weights, also from a checkpoint with `weights_only`; raises like `load_state`."""
    state = _weights(worker)
    load_shards(_tensors(state), folder / SHARDS)
    set_model_state_dict(worker.module, state["model"], options=_TRAINED)


def _weights(worker: Actor | Critic) -> dict[str, Any]:
    worker.to_device()
    return {"model": get_model_state_dict(worker.module, options=_TRAINED)}


def _state(worker: Actor | Critic) -> dict[str, Any]:
    worker.to_device(optimizer=True)
    model, optimizer = get_state_dict(worker.module, worker.optimizer, options=_TRAINED)
    state = {"model": model, "optimizer": optimizer}
    if isinstance(worker, Actor):
        state["teacher"] = worker.teacher_weights.copies
        if worker.reference_weights is not None:
            state["reference"] = worker.reference_weights.copies
    return state


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a state by their joined names, such as `model.<weight>` or `optimizer.<weight>.exp_avg`."""
    named: dict[str, Tensor] = {}
    for kind, content in state.items():
        entries = content["state"] if kind == "optimizer" else content
        for name, entry in entries.items():
            parts = {"": entry} if isinstance(entry, Tensor) else {f".{each}": entry[each] for each in entry}
            named |= {f"{kind}.{name}{suffix}": tensor for suffix, tensor in parts.items()}
    return named


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state().tolist(), "python": random.getstate(), "cuda": cuda}


def _set_random_state(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(saved["cuda"], dtype=torch.uint8))
