"""Reads pickles, and the archives that `torch.save` writes, as data.

No name in a pickle is looked up, called or changed. Python's unpickler and torch's restricted one create real objects,
and a list of harmless names does not make that safe: the opcode BUILD can set the attributes of a class that the whole
process uses, and the calls that torch permits include those that start a process group.
"""

from __future__ import annotations

import io
import math
import pickletools
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch

LARGEST_PICKLE = 1 << 24
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_REBUILD = "torch._utils._rebuild_tensor_v2"
_STORED = "a reference to a storage"
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in _STORAGES.values()}
_NAMES = {
    *(f"{_METADATA}.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(f"{_METADATA}.{name}" for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    f"{_METADATA}._MEM_FORMAT_ENCODING",
    f"{_FILES}._StorageInfo",
    *(f"{module}.{system}Path" for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
    *("torch.serialization._get_layout", "torch.Size", "collections.OrderedDict", _REBUILD),
    *DTYPES,
    *_STORAGES,
}
"""The names that a genuine checkpoint has."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_LAST = {"APPEND": 1, "SETITEM": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME", "STOP"}


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle states of an object: its class or function, the arguments of the call, and the state set after it.

    `arguments` is None for a class or function itself.
    """

    name: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None


def read_pickle(content: bytes) -> Any:
    """Returns numbers, texts, tuples, lists, mappings and records.

    Each list, tuple and mapping occurs in one place, so the result is a tree no larger than the file.

    Raises:
        UnpicklingError: it asks for a name that no checkpoint has, or for a change of a class.
        Exception: it is damaged.
    """
    return _Machine().run(content)


class _Machine:
    """The stack machine of the pickle format, with the opcodes that checkpoints use."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._marked: list[list[object]] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name not in _IGNORED:
                self._act(name, argument)
        (value,) = self._stack
        return value

    def _act(self, name: str, argument: Any) -> None:
        match name:
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                value = self._memo[argument]
                if isinstance(value, list | dict | tuple):
                    raise ValueError("it has a list, tuple or mapping in two places")
                self._stack.append(value)
            case "MARK":
                self._marked.append(self._stack)
                self._stack = []
            case "EMPTY_LIST" | "EMPTY_DICT":
                self._stack.append([] if name == "EMPTY_LIST" else {})
            case "TUPLE" | "APPENDS" | "SETITEMS":
                items, self._stack = self._stack, self._marked.pop()
                self._collect(name, items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" | "APPEND" | "SETITEM":
                self._collect(name, [self._stack.pop() for _ in range(_LAST[name])][::-1])
            case "GLOBAL":
                self._name(argument.replace(" ", "."))
            case "STACK_GLOBAL":
                attribute, module = self._stack.pop(), self._stack.pop()
                self._name(f"{module}.{attribute}")
            case "REDUCE" | "NEWOBJ":
                arguments, made = self._stack.pop(), self._stack.pop()
                if not isinstance(made, Record) or made.arguments is not None or not isinstance(arguments, tuple):
                    raise ValueError("it calls what is no class or function")
                self._stack.append(Record(made.name, arguments))
            case "BUILD":
                state, record = self._stack.pop(), self._stack[-1]
                if not isinstance(record, Record) or record.arguments is None or record.state is not None:
                    raise UnpicklingError(f"it changes {record.name if isinstance(record, Record) else 'a value'}")
                record.state = state
            case "BINPERSID":
                self._stack.append(Record(_STORED, (self._stack.pop(),)))
            case _:
                raise ValueError(f"it has the opcode {name}")

    def _collect(self, name: str, items: list[object]) -> None:
        if name.startswith("TUPLE"):
            self._stack.append(tuple(items))
            return
        target = self._stack[-1]
        if name.startswith("APPEND") and isinstance(target, list):
            target.extend(items)
        elif name.startswith("SETITEM") and isinstance(target, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if not isinstance(key, str | int | Record):  # the hash of a deep tuple can overflow the stack
                    raise ValueError(f"it has a key of type {type(key).__name__}")
                target[key] = value
        else:
            raise ValueError("it adds entries to what is no list or mapping")

    def _name(self, name: str) -> None:
        if name not in _NAMES:
            raise UnpicklingError(f"it asks for {ascii(name[:100])[1:-1]}")
        self._stack.append(Record(name))


def read_archive(content: bytes) -> Any:
    """Returns the tensors and plain values in what `torch.save` wrote; raises as `read_pickle`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise ValueError("it is compressed")
        claimed = sum(info.file_size for info in members.values())
        if claimed > len(content) or members["data.pkl"].file_size > LARGEST_PICKLE:
            raise ValueError("it claims to be larger than it is")
        if "byteorder" in members and archive.read(members["byteorder"]).decode() != sys.byteorder:
            raise ValueError("it was written on a machine of another byte order")
        return _Values(archive, members).of(read_pickle(archive.read(members["data.pkl"])))


class _Values:
    """Turns the records of tensors into tensors, and refuses other records."""

    def __init__(self, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> None:
        self._archive, self._members = archive, members
        self._read: dict[str, torch.Tensor] = {}

    def of(self, value: object) -> Any:
        if isinstance(value, Record):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        return type(value)(map(self.of, value)) if isinstance(value, list | tuple) else value

    def _tensor(self, record: Record) -> torch.Tensor:
        if record.name != _REBUILD or record.arguments is None:
            raise ValueError(f"it has {record.name} in place of a value")
        stored, offset, size, stride, *_ = record.arguments
        ((_, storage, key, *_),) = stored.arguments
        if key not in self._read:
            self._read[key] = self._storage(self._members[f"data/{key}"], _STORAGES[storage.name])
        whole = self._read[key]
        if whole.dtype != _STORAGES[storage.name] or math.prod(size) > whole.numel():
            raise ValueError("a tensor is larger than what is stored of it")
        return whole.as_strided(size, stride, offset)

    def _storage(self, info: zipfile.ZipInfo, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(info.file_size // dtype.itemsize, dtype=dtype)
        buffer, done = whole.view(torch.uint8).numpy(), 0
        member: Any
        with self._archive.open(info) as member:
            while count := member.readinto(buffer[done : done + (1 << 20)]):
                done += count
        if done != info.file_size:
            raise ValueError(f"a tensor has {done} of {info.file_size} bytes")
        return whole


def fields(record: Any, name: str) -> dict[str, Any]:
    """Returns the state of the record of a class; raises ValueError if it is none."""
    known = isinstance(record, Record) and record.name.rpartition(".")[2] == name and record.arguments == ()
    state = (record.state or {}) if known else None
    if not isinstance(state, dict):
        raise ValueError(f"it lacks a {name}")
    return state


def whole_numbers(value: object) -> tuple[int, ...]:
    """Returns a tuple of sizes or offsets; raises ValueError if it is none."""
    if isinstance(value, Record) and value.name == "torch.Size" and value.arguments:
        (value,) = value.arguments
        if isinstance(value, Sequence) and all(type(number) is int and 0 <= number < 1 << 62 for number in value):
            return tuple(value)
    raise ValueError("a size or an offset is no tuple of whole numbers")
