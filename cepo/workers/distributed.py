"""Sets up the process group and device mesh, also for a single process, so that all runs share one code path."""

from __future__ import annotations

import os

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from cepo.metrics import Metrics


def this_device() -> torch.device:
    """Returns this process's GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def process_group_backend(device: torch.device) -> str:
    """Returns the backend for `dist.init_process_group`; with GPUs, tensors in host memory need gloo besides NCCL."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def stay_on_loopback() -> None:
    """Makes gloo listen only on the loopback interface, for processes on one machine; a user's choice takes precedence.

    Otherwise gloo would listen on the address of the host name, to which anyone in the network can connect.
    """
    addresses = psutil.net_if_addrs()
    loopback = next(name for name in addresses if any(one.address == "127.0.0.1" for one in addresses[name]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def data_parallel_mesh(fsdp_size: int) -> DeviceMesh:
    """Returns the device mesh of all processes; without a process group, starts one with a single process.

    Weights are sharded over one axis. If `fsdp_size` is positive and below the number of processes, which must be a
    multiple of it, there are two axes: replicas of the weights, each sharded over `fsdp_size` neighbouring processes.
    """
    device = this_device()
    if not dist.is_initialized():
        stay_on_loopback()
        dist.init_process_group(process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    if fsdp_size <= 0 or fsdp_size >= size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def on_first_rank(metrics: Metrics) -> Metrics:
    """Returns `metrics` on rank 0 and none on other ranks, so that values equal on all ranks count once."""
    return metrics if dist.get_rank() == 0 else {}


def reshard(module: nn.Module) -> None:
    """Frees all gathered weights, so that `module.parameters()` are the shards that are trained and saved.

    After a pass without gradient, the root is still gathered, and so are blocks that are not resharded after forward. A
    write to a gathered parameter would be lost at the next reshard.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
