"""The weights of a model whose adapter the rollout engine cannot take: each adapted weight with its adapter in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cepo.models.quantization import dequantised, quantised_weights
from cepo.workers.gathering import GatheredWeights

_BASE, _ADAPTER = ".base_layer.", "default"


class MergedWeights(Mapping[str, Tensor]):
    """The base model's names with the weights that an adapted model computes with, each made as it is read; collective.

    LoRA (arXiv 2106.09685): `W + s B A` with the scale `s = alpha / rank`. DoRA (arXiv 2402.09353): that sum V, each row scaled
    to the trained magnitude, `m V / |V|`, with the norm over a row's inputs. Sums are in float32 and rounded once, to W's type.
    A weight W in 4 bits is the one that a pass dequantises, in the type of the computation.

    Args:
        module: holds a PEFT model as `model`, sharded or not.
        scale: alpha / rank.
        device: where a whole weight is put together.
    """

    def __init__(self, module: nn.Module, *, scale: float, device: torch.device) -> None:
        prefix = "model.base_model.model."
        self._gathered = GatheredWeights(module, prefix=prefix, device=device)
        self._packed = {name.removeprefix(prefix): weight for name, weight in quantised_weights(module).items()}
        self._scale = scale
        self._names = {
            name.replace(_BASE, "."): name
            for name in self._gathered
            if ".lora_" not in name  # A, B and the magnitude of DoRA
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
