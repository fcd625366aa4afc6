"""Saves and restores a worker's state with torch.distributed.checkpoint, and the adapter in PEFT's format."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
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
from cepo.workers.shards import load_shards, read_saved

SHARDS = "distributed"
RANDOM_STATE = "random_state.pt"
ADAPTER = "lora_adapter"


def save_actor(actor: Actor, folder: Path, *, weights_only: bool = False) -> None:
    """Saves sharded trainable weights, optimizer and teacher weights, the random state and, under LoRA, the adapter.

    With `weights_only`, only the trainable weights and the adapter are written, and no run can resume from them.
    Collective: all ranks write to one folder on shared storage, which is complete when all have returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(_weights(actor) if weights_only else _state(actor), checkpoint_id=str(folder / SHARDS))
    actor.offload.offload_optimizer()
    rank, adapter = dist.get_rank(), actor.adapter_weights() if actor.has_adapter else None
    # Each rank's own files come last, so that no other rank waits for a failed write.
    if not weights_only:
        torch.save(_random_state(), folder / _random_state_file(rank))
    if adapter is not None and rank == 0:
        adapter.write(folder / ADAPTER)
        write_quantization(actor.module.base, folder / ADAPTER)


def load_actor(actor: Actor, folder: Path) -> None:
    """Restores a checkpoint of `save_actor` on any number of ranks; a rank without a saved random state uses rank 0's.

    Raises:
        CheckpointError: files are missing, would run code, or belong to another model, adapter or teacher.
    """
    state = _state(actor)
    with _refused_where_it_does_not_fit(folder):
        load_shards(state, folder / SHARDS)
        own = folder / _random_state_file(dist.get_rank())
        random_state = read_saved(own if own.is_file() else folder / _random_state_file(0))
    _restore(actor, state)
    actor.teacher_weights.load_state_dict(state["teacher"])
    if actor.reference_weights is not None:
        actor.reference_weights.load_state_dict(state["reference"])
    with _refused_where_it_does_not_fit(folder):
        torch.set_rng_state(random_state["torch"])
        random.setstate(random_state["python"])
        if random_state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"][0])


def load_weights(actor: Actor, folder: Path) -> None:
    """Restores only the trained weights, from a checkpoint of any method, also one written with `weights_only`.

    Raises:
        CheckpointError: files are missing, would run code, or belong to another model or adapter.
    """
    state = _weights(actor)
    with _refused_where_it_does_not_fit(folder):
        load_shards(state, folder / SHARDS)
    options = StateDictOptions(strict=False, ignore_frozen_params=True)
    set_model_state_dict(actor.module, state["model"], options=options)


def save_critic(critic: Critic, folder: Path, *, weights_only: bool = False) -> None:
    """Saves sharded trainable weights and, unless `weights_only`, the optimizer state; no random state."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(_weights(critic) if weights_only else _trained_state(critic), checkpoint_id=str(folder / SHARDS))
    critic.offload.offload_optimizer()


def load_critic(critic: Critic, folder: Path) -> None:
    """Restores a checkpoint of `save_critic`.

    Raises:
        CheckpointError: files are missing, would run code, or belong to another model.
    """
    state = _trained_state(critic)
    with _refused_where_it_does_not_fit(folder):
        load_shards(state, folder / SHARDS)
    _restore(critic, state)


def _weights(worker: Actor | Critic) -> STATE_DICT_TYPE:
    worker.offload.load_weights()
    return {"model": get_model_state_dict(worker.module, options=StateDictOptions(ignore_frozen_params=True))}


def _trained_state(worker: Actor | Critic) -> STATE_DICT_TYPE:
    worker.offload.load_weights()
    worker.offload.load_optimizer()
    model, optimizer = get_state_dict(
        worker.module, worker.optimizer, options=StateDictOptions(ignore_frozen_params=True)
    )
    return {"model": model, "optimizer": optimizer}


def _restore(worker: Actor | Critic, state: STATE_DICT_TYPE) -> None:
    set_state_dict(
        worker.module,
        worker.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False, ignore_frozen_params=True),
    )
    # The moments come from the checkpoint; their settings come from the resumed run, which sets the learning rate later.
    for group in worker.optimizer.param_groups:
        group.update(worker.optimizer.defaults)
    worker.offload.offload_optimizer()


def pass_interruption_on(error: BaseException) -> None:
    """Raises KeyboardInterrupt if torch.distributed.checkpoint has wrapped one as a failed read or write."""
    failures = error.failures if isinstance(error, dcp.CheckpointException) else {}
    if any(isinstance(cause, KeyboardInterrupt) for cause, _ in failures.values()):
        raise KeyboardInterrupt from error


@contextmanager
def _refused_where_it_does_not_fit(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's CheckpointException is not a subclass of Exception
        pass_interruption_on(error)
        raise CheckpointError(f"{folder} cannot be restored into this model: {error}") from error


def _state(actor: Actor) -> STATE_DICT_TYPE:
    state = {**_trained_state(actor), "teacher": actor.teacher_weights.state_dict()}
    if actor.reference_weights is not None:
        state["reference"] = actor.reference_weights.state_dict()
    return state


def _random_state_file(rank: int) -> str:
    return RANDOM_STATE if rank == 0 else f"random_state_of_rank_{rank}.pt"


def _random_state() -> STATE_DICT_TYPE:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": cuda}
