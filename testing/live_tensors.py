"""What tensors exist while a piece of work runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """The largest tensor that an operation made, in elements, and the most bytes that were alive at one time.

    Of bytes, storages of less than `floor` and those of `known` tensors are left out.
    """

    def __init__(self, *, floor: int = 0, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._floor = floor
        self._known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage not in self._known and tensor.untyped_storage().nbytes() >= self._floor:
                    self._sizes[storage] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """The bytes alive now."""
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        return sum(self._sizes.values())
