"""Computes on the processor what is asked of a GPU that computes nothing, and refuses to mix devices as a GPU does."""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("cpu")
_WITHOUT_SHAPE = (DataDependentOutputException, DynamicOutputShapeException)


class Shapes(NamedTuple):
    """An operation's result without values, and the operands without values beside the real ones."""

    operands: list[tuple[FakeTensor, Tensor]]
    result: Any


class ProcessorBehind(TorchDispatchMode):
    """Runs each operation on CUDA tensors on the processor, in place, since the hollow GPU's memory is the host's.

    Before that, the operation runs under `FakeTensorMode`, which raises where its operands are on different devices; once for
    each operation with the same shapes, types and devices.

    Attributes:
        operations: number of operations with CUDA tensors.
        waits: number of operations that the host of a card would wait for, by operation and by the function that asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.waits: Counter[str] = Counter()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._checked: set[object] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # torch itself asks for shapes alone
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # DTensor calls again with the tensors that it holds
        asked = kwargs.get("device")
        device = torch.device(asked) if asked is not None else None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if (
            func.is_view
            or torch.Tag.inplace_view in func.tags
            or (cuda is None and (device is None or device.type != "cuda"))
        ):
            return func(*args, **kwargs)
        self.operations += 1
        if is_waited_for(func, args, kwargs):
            self.waits[f"{func.__name__.partition('.')[0]} in {asking_function()}"] += 1
        place = device if device is not None else cuda
        if func.namespace == "c10d":
            return self._communicated(func, args, kwargs, place)
        return self._operated(func, args, kwargs, place)

    def _operated(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        key = described((func, args, kwargs))
        if key not in self._checked:
            self._shapes(func, args, kwargs)  # raises if the devices are mixed
            self._checked.add(key)
        return self._computed(func, args, kwargs, place)

    def _communicated(self, func: Any, args: Any, kwargs: Any, place: torch.device | None) -> Any:
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{func}: tensors of one collective operation are on {devices}")
        return self._computed(func, args, kwargs, place)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Shapes | None:
        """Returns the operation's result without values; None if its shape depends on values.

        Raises if its operands are on different devices.
        """
        operands: list[tuple[FakeTensor, Tensor]] = []

        def hollow(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            fake = FakeTensor(self._fake, shape, value.device)
            operands.append((fake, value))
            return fake

        try:
            with self._fake:
                result = func(*tree_map(hollow, args), **tree_map(hollow, kwargs))
        except _WITHOUT_SHAPE:
            return None  # no operand was at fault before
        return Shapes(operands, result)

    def _computed(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        """Returns the operation's result, computed on the processor and on `device`."""
        device_tensors: dict[int, Tensor] = {}  # by the id of the processor's tensor with the same memory

        def to_host(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_cuda:
                host_tensor = same_memory(value)
                device_tensors[id(host_tensor)] = value
                return host_tensor
            return HOST if isinstance(value, torch.device) else value

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor) or device is None or device.type != "cuda":
                return value
            if id(value) in device_tensors:
                return device_tensors[id(value)]
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            same_memory(copy).copy_(value)
            return copy

        compute: Any = ONLY_ON_GPUS.get(func, func)
        host_args = tree_map(to_host, args)
        host_kwargs = tree_map(to_host, kwargs)
        return tree_map(back, compute(*host_args, **host_kwargs))


READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}
"""Operations whose result, or whose result's size, the host reads from the card."""


def is_waited_for(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether the host waits: for values that it reads, a mask's number of entries, or a copy between the two memories.

    Only a copy that is asked not to block, and whose host memory is page-locked, is not waited for.
    """
    name = func.__name__.partition(".")[0]
    if name in READS:
        return args[0].is_cuda
    if name.startswith("index") and isinstance(args[1], (list, tuple)):
        return any(index is not None and index.is_cuda and index.dtype == torch.bool for index in args[1])
    if name == "_to_copy":
        source, device = args[0], kwargs.get("device")
        goes_to_card = source.is_cuda if device is None else torch.device(device).type == "cuda"
        return source.is_cuda != goes_to_card and _blocks(source, kwargs.get("non_blocking", False))
    if name == "copy_":
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        host_tensor = target if source.is_cuda else source
        return source.is_cuda != target.is_cuda and _blocks(host_tensor, non_blocking)
    return False


def _blocks(source: Tensor, non_blocking: bool) -> bool:
    return not (non_blocking and (source.is_cuda or source.is_pinned()))


def asking_function() -> str:
    """Returns the name of the innermost function of cepo or transformers on the stack."""
    names = ["the backward pass"]
    for frame in traceback.extract_stack():
        in_model = "/cepo/" in frame.filename or "/transformers/" in frame.filename
        if in_model and not frame.name.startswith("<"):  # not a comprehension
            names.append(f"{Path(frame.filename).stem}.{frame.name}")
    return names[-1]


def described(value: Any) -> object:
    """Returns what the shapes of an operation's result depend on, as a key."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(described(entry) for entry in value)
    if isinstance(value, dict):
        return tuple((name, described(entry)) for name, entry in value.items())
    return type(value), value


def same_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor of the processor with the memory of a tensor of the hollow GPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    of_host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(of_host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _wide_product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return left.to(out_dtype) @ right.to(out_dtype)


ONLY_ON_GPUS: dict[Any, Callable[..., Any]] = {torch.ops.aten.mm.dtype: _wide_product}
"""Operations that the processor does not have."""
