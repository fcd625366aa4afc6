"""Gathers whole weights from shards, with or without the adapter merged into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cepo.models.quantization import dequantised, quantised_weights
from cepo.workers.distributed import reshard

_BASE, _ADAPTER = ".base_layer.", "default"


def whole_tensor(tensor: Any) -> Tensor:
    """Gathers a sharded tensor (collective), or returns an unsharded tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GatheredWeights(Mapping[str, Tensor]):
    """A module's weights by name, each gathered when it is read and freed when the reader drops it.

    Only one whole weight exists at a time, so no second copy of the model is needed. Collective: all ranks must read
    the same names in the same order, as iteration does. Readers must copy what they keep: it may be the trained weight.

    Args:
        module: the model, sharded or not.
        prefix: the prefix to remove from each name.
        device: the device on which a weight is gathered.
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
    """Returns CPU copies of the whole trained weights on every rank; collective.

    They share one block of memory, because each copy from a device waits for it, and an adapter has hundreds of small
    tensors. The device briefly holds them twice.
    """
    reshard(module)
    found = {
        name.removeprefix(prefix): whole_tensor(parameter.detach().to(device))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    block = torch.cat([tensor.flatten() for tensor in found.values()]).cpu()
    parts = block.split([tensor.numel() for tensor in found.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(found.items(), parts, strict=True)}


class MergedWeights(Mapping[str, Tensor]):
    """The weights of an adapted model under the base model's names, each merged when it is read. Collective.

    LoRA (arXiv 2106.09685): `V = W + s B A` with the scale `s = alpha / rank`. DoRA (arXiv 2402.09353): `m V / |V|`,
    each row of V scaled to its trained magnitude m, with the norm over the row's inputs. Sums are computed in float32
    and rounded once to W's type. For a 4-bit base, W is the dequantised weight in the compute type.

    Args:
        module: a module whose `model` is a PEFT model, sharded or not.
        scale: alpha / rank.
        device: the device on which a weight is gathered.
    """

    def __init__(self, module: nn.Module, *, scale: float, device: torch.device) -> None:
        prefix = "model.base_model.model."
        self._gathered = GatheredWeights(module, prefix=prefix, device=device)
        self._packed = {name.removeprefix(prefix): weight for name, weight in quantised_weights(module).items()}
        self._scale = scale
        self._names = {
            name.replace(_BASE, "."): name
            for name in self._gathered
            if ".lora_" not in name  # A, B and DoRA's magnitude
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        source = self._names[name]
        layer = source.removesuffix(f"{_BASE}weight")
        weight = dequantised(self._packed[source]) if source in self._packed else self._gathered[source]
        if layer == source:
            return weight
        down, up = (self._gathered[f"{layer}.{part}.{_ADAPTER}.weight"] for part in ("lora_A", "lora_B"))
        total = weight.float().addmm(up.float(), down.float(), alpha=self._scale)
        magnitude = f"{layer}.lora_magnitude_vector.{_ADAPTER}.weight"
        if magnitude in self._gathered:
            total *= (self._gathered[magnitude].float() / torch.linalg.norm(total, dim=1))[:, None]
        return total.to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
