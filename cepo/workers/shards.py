"""Reads checkpoint shards of torch.distributed.checkpoint and other checkpoint files as data, never as pickles.

Torch's reader unpickles `.metadata`, and its planner unpickles entries that are not tensors, so a malicious file could
run any code. Checksums do not help, because the attacker writes them too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from cepo.errors import CheckpointError
from cepo.workers.inert_pickle import (
    DTYPES,
    LARGEST_PICKLE,
    Record,
    fields,
    read_archive,
    read_pickle,
    whole_numbers,
)

METADATA = ".metadata"
_LARGEST_METADATA = 1 << 26


class _Place(NamedTuple):
    file: str
    start: int
    length: int


class ShardReader(dcp.FileSystemReader):
    """Torch's shard reader, without pickle, and restricted to shards in its own folder.

    Raises:
        CheckpointError: `.metadata` is missing, damaged, refers to names that do not describe shards, or describes
            tensors whose chunks have gaps, overlap or are not stored.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        path = folder / METADATA  # common to all ranks; if unreadable, torch would try a rank's own file
        with _reading(path):
            content = fields(read_pickle(_content(path, _LARGEST_METADATA)), "Metadata")
            self._locations = dict(_place(index, info) for index, info in content["storage_data"].items())
            self._require_stored(path)
            entries = {name: self._entry(name, entry) for name, entry in content["state_dict_metadata"].items()}
        self._metadata = Metadata(entries, storage_data={})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            location = self._locations[index.fqn, index.offset]
            with (
                _reading(f"the entry '{index.fqn}' of {self._folder}"),
                (self._folder / location.file).open("rb") as file,
            ):
                file.seek(location.start)
                value = read_archive(file.read(location.length))
                self._require_described(item, value, planner)
            if item.type == LoadItemType.TENSOR:
                part = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item).detach()
                target.copy_(value[part])
                planner.commit_tensor(item, target)
            else:
                plain = io.BytesIO()  # torch's planner unpickles the value, so it gets a pickle of our own
                torch.save(value, plain)
                plain.seek(0)
                planner.load_bytes(item, plain)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _require_stored(self, path: Path) -> None:
        for file in {location.file for location in self._locations.values()}:
            found = self._folder / file
            if Path(file).name != file or not _is_regular(found):
                raise CheckpointError(
                    f"{path} names the shard {file!a}, which is not a file in its folder; give another checkpoint"
                )
        sizes = {location.file: (self._folder / location.file).stat().st_size for location in self._locations.values()}
        if any(location.start + location.length > sizes[location.file] for location in self._locations.values()):
            raise ValueError("an entry ends behind its shard")

    def _entry(self, name: str, entry: Record) -> TensorStorageMetadata | BytesStorageMetadata:
        if entry.name.endswith(".BytesStorageMetadata"):
            self._require_place(name, None, 0)
            return BytesStorageMetadata()
        tensor = fields(entry, "TensorStorageMetadata")
        dtype, *_ = tensor["properties"].state
        properties, size = TensorProperties(dtype=DTYPES[dtype.name]), whole_numbers(tensor["size"])
        parts = [fields(chunk, "ChunkStorageMetadata") for chunk in tensor["chunks"]]
        chunks = [
            ChunkStorageMetadata(torch.Size(whole_numbers(part["offsets"])), torch.Size(whole_numbers(part["sizes"])))
            for part in parts
        ]
        if not _tile(size, chunks):
            raise ValueError(f"the chunks of {name!a} do not cover it exactly once")
        for chunk in chunks:
            self._require_place(name, chunk.offsets, math.prod(chunk.sizes) * properties.dtype.itemsize)
        return TensorStorageMetadata(properties, torch.Size(size), chunks)

    def _require_place(self, name: str, offsets: Sequence[int] | None, size: int) -> None:
        """Requires that the entry is stored, in the size of its values and of what may describe them."""
        location = self._locations.get((name, None if offsets is None else tuple(offsets)))
        if location is None or not size < location.length <= size + LARGEST_PICKLE:
            raise ValueError(f"{name!a} is not stored, or not in its size")

    def _require_described(self, item: ReadItem, value: Any, planner: Any) -> None:
        if item.type == LoadItemType.TENSOR:
            entry: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
            sizes = [chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset]
            if not isinstance(value, torch.Tensor) or value.dtype != entry.properties.dtype or value.shape not in sizes:
                raise ValueError(f"it is not the tensor that {METADATA} describes")
        else:
            target = planner.state_dict[item.dest_index.fqn]
            if _kind(value) != _kind(target) or (_kind(value) == "names" and list(value) != list(target)):
                raise ValueError(f"it has a value of kind '{_kind(value)}' in place of one of kind '{_kind(target)}'")


def load_shards(state: STATE_DICT_TYPE, folder: Path, *, no_dist: bool = False) -> None:
    """Fills `state` from the shards in `folder`, on any number of ranks.

    Raises:
        CheckpointError: as `ShardReader`; or an entry is damaged or has other contents.
        Exception, dcp.CheckpointException: torch's own errors, for missing or mismatched entries.
    """
    reader = ShardReader(folder)  # if this file is refused, torch would try another one and log a traceback
    try:
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):
                raise cause from error
        raise


def read_saved(path: Path) -> Mapping[str, Any]:
    """Reads a mapping of numbers and tensors written by `torch.save`.

    Raises:
        CheckpointError: the file is missing, damaged, too large, or has other contents.
    """
    with _reading(path):
        value = read_archive(_content(path, LARGEST_PICKLE))
        if not isinstance(value, Mapping):
            raise ValueError(f"it holds a {type(value).__name__}, not a mapping")
    return value


def _place(index: Record, info: Record) -> tuple[tuple[str, tuple[int, ...] | None], _Place]:
    key, location = fields(index, "MetadataIndex"), fields(info, "_StorageInfo")
    name, offset = key["fqn"], key.get("offset")
    file, start, length = (location[part] for part in ("relative_path", "offset", "length"))
    numbers = type(start) is int and type(length) is int and start >= 0
    if not numbers or not isinstance(name, str) or not isinstance(file, str) or location.get("transform_descriptors"):
        raise ValueError("it has an entry at no known place")
    return (name, None if offset is None else whole_numbers(offset)), _Place(file, start, length)


def _tile(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Returns whether the chunks cover a tensor exactly once, as slabs along one dimension, which FSDP writes."""
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    if not size:
        return len(chunks) == 1
    cut = next((axis for axis, whole in enumerate(size) if any(chunk.sizes[axis] != whole for chunk in chunks)), 0)
    others = [axis for axis in range(len(size)) if axis != cut]
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.offsets[cut], chunk.sizes[cut])):
        whole = all(chunk.offsets[axis] == 0 and chunk.sizes[axis] == size[axis] for axis in others)
        if not whole or chunk.offsets[cut] != end:
            return False
        end += chunk.sizes[cut]
    return bool(chunks) and end == size[cut]


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return "number or nothing"
    if isinstance(value, list | tuple):
        return "names" if any(isinstance(item, str) for item in value) else "list"
    return type(value).__name__


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _content(path: Path, limit: int) -> bytes:
    if not _is_regular(path) or path.stat().st_size > limit:
        raise ValueError(f"it is not a regular file of at most {limit} bytes")
    return path.read_bytes()


@contextmanager
def _reading(name: Path | str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except UnpicklingError as error:
        raise CheckpointError(
            f"{name} is refused, because {error}: a checkpoint holds numbers and texts alone, and anything else could "
            "run code of whoever wrote it; give a checkpoint that cepo wrote"
        ) from error
    except Exception as error:  # damaged bytes make the reading raise almost anything
        raise CheckpointError(f"{name} cannot be read: {error!r:.300}; give another checkpoint") from error
