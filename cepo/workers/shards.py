"""Reads checkpoints of torch.distributed.checkpoint and of `torch.save` without running code that they name.

Torch's own reader unpickles `.metadata`, and its planner unpickles entries that are not tensors, so that a malicious
file could run any code. Checksums do not help, because the attacker writes them too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from cepo.errors import CheckpointError
from cepo.foreign_files import open_regular, read_bytes

METADATA = ".metadata"
_LARGEST = 1 << 26
_MODULE = "torch.distributed.checkpoint"
_CLASSES = {
    *(f"{_MODULE}.metadata.{name}StorageMetadata" for name in ("Bytes", "Chunk", "Tensor")),
    *(f"{_MODULE}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    f"{_MODULE}.metadata._MEM_FORMAT_ENCODING",
    f"{_MODULE}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
}


class _MetadataReader(pickle.Unpickler):
    """Unpickles what torch writes into `.metadata`, and refuses any other class or function by its name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns a class of torch's metadata; paths, whose class the whole process uses, become text."""
        if module_name.partition(".")[0] == "pathlib":
            return lambda *parts: "/".join(parts)
        name = f"{module_name}.{global_name}"
        if name in _CLASSES or isinstance(
            getattr(torch, global_name, None) if module_name == "torch" else 0, torch.dtype
        ):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it asks for {name[:100]!a}")


class ShardReader(dcp.FileSystemReader):
    """Torch's reader of the shards in a folder, with `.metadata` read as above.

    Raises:
        CheckpointError: `.metadata` is missing, damaged, or names code, or shards outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        path = folder / METADATA  # common to all ranks; if unreadable, torch would try a rank's own file
        with _reading(path):
            content = _MetadataReader(io.BytesIO(read_bytes(path, within=folder, largest=_LARGEST))).load()
            if not isinstance(content, Metadata):
                raise ValueError("it holds no metadata")
            files = {info.relative_path for info in (content.storage_data or {}).values()}
        self._metadata = content
        for file in files:
            found = folder / file
            if found.name != file or found.is_symlink() or not found.is_file():
                raise CheckpointError(
                    f"{path} names the shard {file!a}, which is not a file in its folder; give another checkpoint"
                )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads an entry that is not a tensor; the base class, which unpickles anything, gets a copy of our own."""
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):  # it would replace the tensor, and the model keep its own
            raise ValueError(f"the tensor '{name}' is stored as another value")
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_shards(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fills `state` from the shards in `folder`, on any number of ranks.

    Raises:
        CheckpointError: as `ShardReader`; or an entry asks for code.
        Exception, dcp.CheckpointException: torch's own errors, for missing, damaged or mismatched entries.
    """
    reader = ShardReader(folder)  # if this file is refused, torch would try another one and log a traceback
    try:
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=no_dist)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, pickle.UnpicklingError):
                raise _refused(folder, cause) from error
        raise


def read_saved(path: Path) -> Mapping[str, Any]:
    """Reads a mapping of numbers and tensors written by `torch.save`.

    Raises:
        CheckpointError: the file is missing, damaged, too large, or asks for code.
    """
    with _reading(path), open_regular(path, within=path.parent, largest=_LARGEST) as file:
        value = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(value, Mapping):
            raise ValueError(f"it holds a {type(value).__name__}, not a mapping")
    return value


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except Exception as error:  # damaged bytes make the reading raise almost anything
        raise CheckpointError(f"{path} cannot be read: {error!r:.300}; give another checkpoint") from error


def _refused(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    reason = str(error).partition("\n")[0].partition(". ")[0]
    return CheckpointError(
        f"{path} is damaged, or asks for code of whoever wrote it ({reason}); give a checkpoint that cepo wrote"
    )
