"""The process group and the device mesh, also for a single process: one code path whatever the number of devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule


def this_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def data_parallel_mesh() -> DeviceMesh:
    """A one-dimensional mesh over all processes; starts a process group of one where none has been started."""
    device = this_device()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))


def reshard(module: nn.Module) -> None:
    """Frees all gathered weights, so that `module.parameters()` are the shards that get trained and saved.

    After a pass without gradient the root, and blocks that are not resharded after forward, stay gathered: until then a
    write to a parameter reaches a copy that the next reshard drops.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
