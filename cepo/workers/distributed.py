"""Handles the process group and whole weights of sharded models; a single process has a group too."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from cepo.metrics import Metrics
from cepo.models import pretrained


def this_device() -> torch.device:
    """Returns this process's GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def process_group_backend(device: torch.device) -> str:
    """Returns the backend for `dist.init_process_group`; with GPUs, tensors in host memory need gloo besides NCCL."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def stay_on_loopback() -> None:
    """Makes gloo listen only on the loopback interface, for processes on one machine; a user's choice takes precedence.

    Otherwise gloo would listen on the address of the host name, to which anyone in the network can connect.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return
    raise OSError("this machine has no network interface with the address 127.0.0.1")


def data_parallel_mesh(fsdp_size: int) -> DeviceMesh:
    """Returns the device mesh of all processes; without a process group, starts one with a single process.

    Weights are sharded over one axis. If `fsdp_size` is positive and below the number of processes, which must be a
    multiple of it, there are two axes: replicas of the weights, each sharded over `fsdp_size` neighbouring processes.
    """
    device = this_device()
    if not dist.is_initialized():
        stay_on_loopback()
        dist.init_process_group(process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1)
        # Else threads of gloo may free tensors while Python ends, and abort it: `terminate called without an active exception`
        # (torch's issue 190489).
        atexit.register(_end_process_group)
    num_processes = dist.get_world_size()
    if 0 < fsdp_size < num_processes:
        shape = (num_processes // fsdp_size, fsdp_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (num_processes,), mesh_dim_names=("shard",))


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def on_first_rank(metrics: Metrics) -> Metrics:
    """Returns `metrics` on rank 0 and none on other ranks, so that values equal on all ranks count once."""
    return metrics if dist.get_rank() == 0 else {}


def reshard(module: nn.Module) -> None:
    """Frees all gathered weights, so that `module.parameters()` are the shards that are trained and saved.

    Some are still gathered after a pass without gradient. A write to them would be lost at the next reshard.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_tensor(tensor: Any) -> Tensor:
    """Gathers a sharded tensor (collective), or returns an unsharded tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GatheredWeights(Mapping[str, Tensor]):
    """A module's weights by name, each gathered when it is read and freed when the reader drops it.

    Only one whole weight exists at a time, so no second copy of the model is needed. Collective: all ranks must read
    the same names in the same order, as iteration does. Readers must copy what they keep: it may be the trained weight.
    """

    prefix: ClassVar[str] = "model."
    """What precedes a weight's own name in the names of `ScoringModel`."""

    def __init__(self, module: nn.Module) -> None:
        reshard(module)
        self._shards: dict[str, Any] = {}
        for name, tensor in module.state_dict().items():
            self._shards[name.removeprefix(self.prefix)] = tensor
        self._names = {name: name for name in self._shards}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return self._gather(name)

    def _gather(self, name: str) -> Tensor:
        return whole_tensor(self._shards[name].detach().to(this_device()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@torch.no_grad()
def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns CPU copies of the whole trained weights of a `ScoringModel` on every rank; collective.

    They are copied as one block, because each copy from a device waits for it, and an adapter has hundreds of tensors.
    """
    reshard(module)
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            on_device = parameter.detach().to(this_device())
            weights[name.removeprefix(GatheredWeights.prefix)] = whole_tensor(on_device)
    flat_weights = [weight.flatten() for weight in weights.values()]
    sizes = [len(flat_weight) for flat_weight in flat_weights]
    block = torch.cat(flat_weights).cpu()
    copies: dict[str, Tensor] = {}
    for name, flat_copy in zip(weights, block.split(sizes), strict=True):
        copies[name] = flat_copy.view(weights[name].shape)
    return copies


class MergedWeights(GatheredWeights):
    """The weights of a module with an adapter under the base model's names, each merged when it is read.

    LoRA (arXiv 2106.09685): `V = W + s B A` with the scale `s = alpha / rank`. DoRA (arXiv 2402.09353): `m V / |V|`,
    each row of V scaled to its trained magnitude m, with the norm over the row's inputs. Sums are computed in float32
    and rounded once to W's type. For a 4-bit base, W is the dequantised weight in the compute type.
    """

    prefix = "model.base_model.model."

    def __init__(self, module: nn.Module, *, scale: float) -> None:
        super().__init__(module)
        self._scale = scale
        self._packed: dict[str, Any] = {}
        for name, weight in pretrained.quantised_weights(module).items():
            self._packed[name.removeprefix(self.prefix)] = weight
        self._names = {}
        for name in self._shards:
            if ".lora_" not in name:  # not A, B and DoRA's magnitude
                self._names[name.replace(".base_layer.", ".")] = name

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        source = self._names[name]
        packed = self._packed.get(source)
        weight = self._gather(source) if packed is None else pretrained.dequantised(packed)
        layer = source.removesuffix(".base_layer.weight")
        if layer == source:  # the layer has no adapter
            return weight
        down = self._gather(f"{layer}.lora_A.default.weight").float()
        up = self._gather(f"{layer}.lora_B.default.weight").float()
        total = weight.float().addmm(up, down, alpha=self._scale)
        magnitude_name = f"{layer}.lora_magnitude_vector.default.weight"
        if magnitude_name in self._shards:
            row_factors = self._gather(magnitude_name).float() / torch.linalg.norm(total, dim=1)
            total *= row_factors[:, None]
        return total.to(weight.dtype)
