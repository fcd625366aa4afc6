"""The process group and the device mesh, also for a single process: one code path whatever the number of devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
