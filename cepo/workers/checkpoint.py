"""Saves and restores a worker's state: tensors in safetensors files with each rank's rows, and the adapter in PEFT's format.

FSDP shards every weight, and what belongs to it, along the first dimension. `rank_<i>_of_<n>.safetensors` has the rows
of rank i. Its header also states with which row each tensor begins there, the rows of the whole tensor, and the rank's
notes. Reading such a file runs no code, and it cannot state a tensor without its values.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from cepo.errors import CheckpointError
from cepo.files.safe_files import size_of
from cepo.models.pretrained import write_quantization
from cepo.rollout.generator import AdapterWeights
from cepo.workers.actor import Actor
from cepo.workers.critic import Critic
from cepo.workers.pass_sizes import WITHOUT_CARD, PassSizes

SHARDS = "distributed"
ADAPTER = "lora_adapter"
_PASSES = TypeAdapter(PassSizes)
_TRAINED = StateDictOptions(strict=False, ignore_frozen_params=True)


def save_state(worker: Actor | Critic, folder: Path, *, weights_only: bool = False) -> None:
    """Saves sharded trainable weights, optimizer and teacher weights, the random state and, under LoRA, the adapter.

    With `weights_only`, only the trainable weights and the adapter are written, and no run can resume from them.
    Collective: all ranks write to one folder on shared storage, which is complete when all have returned.
    """
    state = _weights(worker) if weights_only else _state(worker)
    tensors = _tensors(state)
    adapter: AdapterWeights | None = None
    if isinstance(worker, Actor) and worker.has_adapter:
        adapter = worker.adapter_weights()  # collective, so before a write can fail
    notes: dict[str, Any] = {}
    if not weights_only:
        notes["random"] = _random_state()
        if worker.pass_sizes.card > 0:
            notes["passes"] = worker.pass_sizes._asdict()
    write_shards(tensors, folder / SHARDS, notes)
    worker.offload_optimizer()
    if isinstance(worker, Actor) and adapter is not None and dist.get_rank() == 0:
        adapter.write(folder / ADAPTER)
        write_quantization(worker.module.base, folder / ADAPTER)


def load_state(worker: Actor | Critic, folder: Path) -> None:
    """Restores a checkpoint of `save_state` on any number of ranks; a rank without a saved random state uses rank 0's.

    Raises `CheckpointError`: files are missing or damaged, or belong to another model, adapter or teacher.
    """
    state = _state(worker)
    shards = load_shards(_tensors(state), folder / SHARDS)
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
    rank = dist.get_rank()
    source_rank = rank if rank < len(shards.notes) else 0
    try:
        _set_random_state(shards.notes[source_rank]["random"])
    except Exception as error:  # the random state of a stranger can be anything
        raise CheckpointError(f"{folder} has no valid random state ({error}); give another checkpoint") from error
    worker.resume_passes(_recorded_passes(shards.notes[source_rank], folder))


def _recorded_passes(notes: Mapping[str, Any], folder: Path) -> PassSizes:
    """Returns the passes of the run that wrote the checkpoint; those without a card if it chose none by a card."""
    recorded = notes.get("passes")
    if recorded is None:
        return WITHOUT_CARD
    try:
        return _PASSES.validate_python(recorded)
    except ValidationError as error:
        raise CheckpointError(f"{folder} has no valid sizes of passes ({error}); give another checkpoint") from error


def load_weights(worker: Actor | Critic, folder: Path) -> None:
    """Restores the trained weights, also from a checkpoint with `weights_only`; raises like `load_state`.

    A teacher's copy of weights comes from the checkpoint too. If it has none, a copy that follows the actor is the
    restored actor, and one of the initial weights stays.
    """
    state = _weights(worker)
    shards = load_shards(_tensors(state), folder / SHARDS)
    set_model_state_dict(worker.module, state["model"], options=_TRAINED)
    if not isinstance(worker, Actor):
        return
    copies = _tensors({"teacher": worker.teacher_weights.copies})
    has_all_copies = all(shards.shapes.get(name) == shape_of(copy) for name, copy in copies.items())
    if has_all_copies:
        shards.fill(copies)
    else:
        worker.teacher_weights.catch_up()


def _weights(worker: Actor | Critic) -> dict[str, Any]:
    worker.to_device()
    return {"model": trained_state(worker.module)}


def _state(worker: Actor | Critic) -> dict[str, Any]:
    worker.to_device(optimizer=True)
    _, optimizer = get_state_dict(worker.module, worker.optimizer, options=_TRAINED)
    state = {"model": trained_state(worker.module), "optimizer": optimizer}
    if isinstance(worker, Actor):
        state["teacher"] = worker.teacher_weights.copies
        if worker.initial_weights is not None:
            state["reference"] = worker.initial_weights.copies
    return state


def trained_state(module: nn.Module) -> dict[str, Any]:
    """Returns the trained weights and the buffers of a model by name, a weight with several names under its first.

    torch leaves out a frozen weight under its first name alone, so that a frozen head which is tied to the embeddings
    would stay, and a trained one would be there twice.
    """
    further_names = second_names(module)
    state = get_model_state_dict(module, options=_TRAINED)
    return {name: value for name, value in state.items() if name not in further_names}


def second_names(module: nn.Module) -> set[str]:
    """Returns the further names of weights that a model has under several, such as a head tied to the embeddings."""
    first_names = {name for name, _ in module.named_parameters()}
    all_names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return all_names - first_names


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a state by their joined names, such as `model.<weight>` or `optimizer.<weight>.exp_avg`."""
    tensors: dict[str, Tensor] = {}
    for kind, content in state.items():
        entries = content["state"] if kind == "optimizer" else content
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                tensors[f"{kind}.{name}"] = entry
                continue
            for part, tensor in entry.items():
                tensors[f"{kind}.{name}.{part}"] = tensor
    return tensors


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "cuda": None,
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def _set_random_state(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(saved["cuda"], dtype=torch.uint8))


_FILE = "rank_{}_of_{}.safetensors"
_ROWS = "rows"
_NOTES = "notes"
_TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class _Rows(NamedTuple):
    """Consecutive rows of a tensor that a file has."""

    first: int
    end: int
    file: Any


def write_shards(tensors: Mapping[str, Tensor], folder: Path, notes: Mapping[str, Any]) -> None:
    """Writes this rank's rows of `tensors`, and `notes`, a mapping in JSON. Copies one tensor at a time to the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: list[tuple[str, Tensor, int]] = []
    for name, tensor in tensors.items():
        if not _is_first_copy(tensor):
            continue
        rows, first = _own_rows(tensor)
        if len(rows) > 0:
            stored.append((name, rows, first))
    stored.sort(key=lambda entry: -entry[1].element_size())  # so that every number is aligned in the file
    header = _shards_header(stored, tensors, notes)
    file_name = _FILE.format(dist.get_rank(), dist.get_world_size())
    with (folder / file_name).open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for _, rows, _ in stored:
            flat = rows.cpu().contiguous().flatten()
            content: Any = flat.view(torch.uint8).numpy()
            file.write(content)


def _shards_header(
    stored: Sequence[tuple[str, Tensor, int]], tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
) -> bytes:
    """Returns the header of a safetensors file with the `stored` (name, rows, index of the first row) in this order."""
    positions: dict[str, list[int]] = {}
    entries: dict[str, Any] = {}
    start = 0
    for name, rows, first in stored:
        num_all_rows, *_ = shape_of(tensors[name])
        positions[name] = [first, num_all_rows]
        end = start + rows.nbytes
        entries[name] = {
            "dtype": _TYPES[rows.dtype],
            "shape": list(rows.shape),
            "data_offsets": [start, end],
        }
        start = end
    metadata = {_ROWS: json.dumps(positions), _NOTES: json.dumps(notes)}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    padding = b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
    return text + padding


class Shards:
    """The tensors in the files of all ranks.

    Attributes:
        shapes: the shape of each tensor by name; that of a number is (1,).
        notes: the notes of each rank.

    Raises:
        CheckpointError: a file is missing, damaged or not regular, or a tensor's rows are not each stored once.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / ".metadata").exists():
            raise CheckpointError(f"{folder} has the format of cepo 0.4.0; merge it with the version that wrote it")
        self._folder = folder
        self._stored: dict[str, list[_Rows]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.notes: list[dict[str, Any]] = []
        num_files = len(list(folder.iterdir())) if folder.is_dir() else 0
        num_ranks = num_files or 1  # without any file, the first rank's is the missing one
        for rank in range(num_ranks):
            with _reading(folder / _FILE.format(rank, num_ranks)) as path:
                self._add(path)
        for name, parts in self._stored.items():
            parts.sort(key=lambda part: part[:2])
            next_row = 0
            is_complete = True
            for part in parts:
                is_complete = is_complete and part.first == next_row
                next_row = part.end
            if not is_complete or next_row != self.shapes[name][0]:
                raise CheckpointError(f"{folder} does not have every row of {name!a} once; give another checkpoint")

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies stored tensors to those of the same names, which are whole or this rank's shards."""
        for name, tensor in tensors.items():
            target, begin = _own_rows(tensor.detach())
            for part in self._stored[name]:
                # The rows that the file has and this rank needs, as rows of the whole tensor.
                start = max(part.first, begin)
                stop = min(part.end, begin + len(target))
                if start >= stop:
                    continue
                with _reading(self._folder):
                    stored_slice = part.file.get_slice(name)
                    rows = stored_slice[start - part.first : stop - part.first]
                    target[start - begin : stop - begin].copy_(rows)

    def _add(self, path: Path) -> None:
        size_of(path, within=self._folder)
        file = safe_open(path, "pt")
        metadata = file.metadata()
        positions = json.loads(metadata[_ROWS])
        self.notes.append(dict(json.loads(metadata[_NOTES])))
        for name in file.keys():  # noqa: SIM118
            first, total = positions[name]
            stored_slice = file.get_slice(name)
            num_rows, *row_shape = stored_slice.get_shape()
            are_whole_numbers = type(first) is int and type(total) is int
            if not are_whole_numbers:
                raise ValueError(f"the rows of {name!a} are no whole numbers")
            shape = (total, *row_shape)
            if self.shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name!a} has another shape than in other files")
            self._stored.setdefault(name, []).append(_Rows(first, first + num_rows, file))


def load_shards(tensors: Mapping[str, Tensor], folder: Path) -> Shards:
    """Fills `tensors`, on any number of ranks; the folder must have the same of each kind, the first part of a name.

    Raises:
        CheckpointError: it has others, or is refused by `Shards`.
    """
    shards = Shards(folder)
    kinds = {name.partition(".")[0] for name in tensors}
    expected = {name: shape_of(tensor) for name, tensor in tensors.items()}
    saved: dict[str, tuple[int, ...]] = {}
    for name, shape in shards.shapes.items():
        if name.partition(".")[0] in kinds:
            saved[name] = shape
    names = sorted(expected.keys() | saved.keys())
    differing = [name for name in names if expected.get(name) != saved.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{folder} cannot be restored into this model: {len(differing)} tensors differ, such as {name!a} with the shape "
            f"{saved.get(name)}, here {expected.get(name)}; give another checkpoint"
        )
    shards.fill(tensors)
    return shards


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape in which a tensor is stored."""
    return tuple(tensor.shape) or (1,)


def _own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns this rank's rows of a tensor, and the index of the first of them."""
    if not isinstance(tensor, DTensor):
        return tensor.view(shape_of(tensor)), 0
    mesh = tensor.device_mesh
    shard_axis = mesh.ndim - 1
    assert tensor.placements[-1] == Shard(0), f"the placement {tensor.placements} is not one of FSDP"
    rows_per_rank = -(-len(tensor) // mesh.size(shard_axis))  # rounded up
    first = mesh.get_local_rank(shard_axis) * rows_per_rank
    first = min(first, len(tensor))  # ranks after the last row have none
    return tensor.to_local(), first


def _is_first_copy(tensor: Tensor) -> bool:
    """Returns whether this rank is the first of those with the same rows of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    replica_axes = range(tensor.device_mesh.ndim - 1)
    return all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in replica_axes)


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except Exception as error:  # damaged bytes make the reading raise almost anything
        raise CheckpointError(f"{path} cannot be read: {error!s:.300}; give another checkpoint") from error
