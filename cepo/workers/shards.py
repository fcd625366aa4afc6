"""Reads checkpoint shards of torch.distributed.checkpoint and other checkpoint files without running code in them.

Torch's reader unpickles `.metadata`, and its planner unpickles entries that are not tensors. Neither restricts names,
so a malicious file could run any code. Checksums do not help, because the attacker writes them too.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from cepo.errors import CheckpointError

METADATA = ".metadata"
_METADATA_NAMES = {
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""The names to which a genuine `.metadata` refers, besides torch's dtypes."""
_REFUSED_NAME = re.compile(r"(?:GLOBAL|global|class|function) ([\w.]+(?: [\w.]+)?)")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _METADATA_NAMES:
            return super().find_class(module_name, global_name)
        found = getattr(torch, global_name, None) if module_name == "torch" and "." not in global_name else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


class ShardReader(dcp.FileSystemReader):
    """Torch's shard reader, restricted to known names in `.metadata` and to shards in its own folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the folder's `.metadata`.

        Raises:
            CheckpointError: the file is missing, damaged, or refers to names that do not describe shards.
        """
        path = self._folder / METADATA  # common to all ranks; if unreadable, torch would try a rank's own file
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            shards = {str(info.relative_path) for info in metadata.storage_data.values()}
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(path, str(error))) from error
        except Exception as error:  # damaged bytes make the unpickler raise almost anything
            raise CheckpointError(f"{path} cannot be read: {error!r}; give another checkpoint") from error
        for name in sorted(shards):
            if Path(name).name != name or not (self._folder / name).is_file():
                raise CheckpointError(
                    f"{path} names the shard '{name}', which is not a file in its folder; give another checkpoint"
                )
        if getattr(metadata, "storage_meta", None) is None:  # checkpoints of older versions of torch have none
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # pyright: ignore[reportOptionalMemberAccess]
        return metadata


class _PlainValues(DefaultLoadPlanner):
    """Loads entries that are not tensors (numbers, strings, lists, mappings) with torch's restricted unpickler."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = _plain(value, f"the entry '{read_item.storage_index.fqn}' of {self._folder}")
        plain = io.BytesIO()
        torch.save(content, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_shards(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fills `state` from the shards in `folder`, on any number of ranks.

    Raises:
        CheckpointError: a file would run code, or names a file that is not a shard.
        Exception, dcp.CheckpointException: torch's own errors, for missing or mismatched entries.
    """
    reader = ShardReader(folder)
    reader.read_metadata()  # if this file is refused, torch would try another one and log a traceback
    try:
        dcp.load(state, storage_reader=reader, planner=_PlainValues(folder), no_dist=no_dist)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):
                raise cause from error
        raise


def read_saved(path: Path) -> Mapping[str, Any]:
    """Reads a mapping of numbers and tensors written by `torch.save`.

    Raises:
        CheckpointError: the file is missing, damaged, would run code, or has other contents.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give another checkpoint") from error
    value = _plain(io.BytesIO(content), str(path))
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a mapping; give another checkpoint")
    return value


def _plain(file: io.BytesIO, name: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        names = _REFUSED_NAME.search(str(error))
        what = f"it asks for {names[1].replace(' ', '.')}" if names else str(error).splitlines()[0]
        raise CheckpointError(_refusal(name, what)) from error
    except Exception as error:  # damaged bytes make torch raise almost anything
        raise CheckpointError(f"{name} cannot be read: {error!r}; give another checkpoint") from error


def _refusal(path: Path | str, what: str) -> str:
    return (
        f"{path} is refused, because {what}: a checkpoint holds numbers and texts alone, and anything else could run "
        "code of whoever wrote it; give a checkpoint that cepo wrote"
    )
