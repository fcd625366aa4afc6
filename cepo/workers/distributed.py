"""The process group and the device mesh, also for a single process: one code path whatever the number of devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from cepo.errors import ConfigError
from cepo.metrics import Metrics


def this_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def process_group_backend(device: torch.device) -> str:
    """For `dist.init_process_group`: weights and checkpoints in host memory need gloo beside nccl."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def data_parallel_mesh(fsdp_size: int = -1) -> DeviceMesh:
    """All processes; starts a process group of one where none has been started.

    One axis over which weights are sharded; or, where `fsdp_size` is positive and below the number of processes, two:
    copies of the weights, each sharded over `fsdp_size` neighbouring processes.

    Raises:
        ConfigError: the processes do not divide into groups of `fsdp_size`.
    """
    device = this_device()
    if not dist.is_initialized():
        dist.init_process_group(process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    if fsdp_size <= 0 or fsdp_size >= size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if size % fsdp_size:
        raise ConfigError(
            f"fsdp.fsdp_size is {fsdp_size}, but {size} devices do not divide into groups of {fsdp_size}; accepted: a "
            "divisor of the number of devices, or -1 for one group"
        )
    return init_device_mesh(device.type, (size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def on_first_rank(metrics: Metrics) -> Metrics:
    """`metrics` on rank 0 and none elsewhere: for what all ranks know alike, so that merging the ranks counts it once."""
    return metrics if dist.get_rank() == 0 else {}


def reshard(module: nn.Module) -> None:
    """Frees all gathered weights, so that `module.parameters()` are the shards that get trained and saved.

    After a pass without gradient the root, and blocks that are not resharded after forward, stay gathered: until then a
    write to a parameter reaches a copy that the next reshard drops.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
