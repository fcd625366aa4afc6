"""Whole weights from shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cepo.workers.distributed import reshard


def whole_tensor(tensor: Any) -> Tensor:
    """The tensor that the ranks' shards make up; collective. What is not sharded is given back as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GatheredWeights(Mapping[str, Tensor]):
    """A module's weights by name, each gathered when it is asked for and freed when its reader drops it.

    So handing all of them on takes no second copy of the model: one whole weight exists at a time. Collective: all ranks
    ask for the same names in the same order, as iterating does. A tensor may be the trained weight itself; readers copy
    what they keep.

    Args:
        module: sharded or not.
        prefix: what to take away from the start of each name.
        device: where a whole weight is put together.
    """

    def __init__(self, module: nn.Module, *, prefix: str, device: torch.device) -> None:
        reshard(module)
        self._shards = {name.removeprefix(prefix): tensor for name, tensor in module.state_dict().items()}
        self._device = device

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return whole_tensor(self._shards[name].detach().to(self._device))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


@torch.no_grad()
def trained_weights(module: nn.Module, *, prefix: str, device: torch.device) -> dict[str, Tensor]:
    """Copies on the CPU of the whole weights that are trained, on every rank; collective."""
    reshard(module)
    return {
        name.removeprefix(prefix): whole_tensor(parameter.detach().to(device)).cpu().clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
