"""Offloads weights and optimizer state to host memory, block by block (by FSDP) or between the phases of a step.

With `fsdp.enable_cpu_offload` nothing is left to offload between phases. On a CPU, offloading does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cepo.config.schema import FsdpConfig, OffloadConfig
from cepo.workers.distributed import reshard

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


def offload_policy(fsdp: FsdpConfig, device: torch.device) -> OffloadPolicy:
    """Returns FSDP's offload policy: with offloading, shards are in host memory and loaded block by block."""
    if not fsdp.enable_cpu_offload:
        return OffloadPolicy()
    if device.type == "cpu":
        logger.warning("fsdp.enable_cpu_offload has no effect: the device is the CPU")
        return OffloadPolicy()
    return CPUOffloadPolicy()


class PhaseOffload:
    """Moves a worker's weights and optimizer state between its device and host memory.

    `weights_here` or `optimizer_here` must be called before each use; they load what was offloaded.

    Args:
        module: the sharded model.
        optimizer: the optimizer of its weights.
        config: what to offload.
        fsdp: with `enable_cpu_offload`, everything is in host memory anyway and nothing moves.
        device: the worker's device.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, config: OffloadConfig, fsdp: FsdpConfig, device: torch.device
    ) -> None:
        self._module, self._optimizer, self._device = module, optimizer, device
        can_move = device.type != "cpu" and not fsdp.enable_cpu_offload
        self._moves_weights = config.offload_params and can_move
        self._moves_optimizer = config.offload_optimizer and can_move
        self._weights_away = False
        if (config.offload_params or config.offload_optimizer) and not can_move:
            why = (
                "the device is the CPU" if device.type == "cpu" else "fsdp.enable_cpu_offload keeps all in host memory"
            )
            logger.warning("offload.offload_params and offload.offload_optimizer have no effect: %s", why)

    def weights_here(self) -> None:
        """Moves the weights to the device."""
        if self._weights_away:
            self._module.to(self._device)
            self._weights_away = False

    def weights_away(self) -> None:
        """Moves the shards to host memory and frees gathered copies and gradients."""
        if not self._moves_weights or self._weights_away:
            return
        reshard(self._module)
        self._optimizer.zero_grad(set_to_none=True)
        self._module.to(_HOST)
        self._weights_away = True
        torch.cuda.empty_cache()

    def optimizer_here(self) -> None:
        """Moves the optimizer state to the device."""
        if self._moves_optimizer:
            move_state(self._optimizer, self._device)

    def optimizer_away(self) -> None:
        """Moves the optimizer state to host memory."""
        if self._moves_optimizer:
            move_state(self._optimizer, _HOST)
            torch.cuda.empty_cache()


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves Adam's moments to `device`, but not the step count."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0):
                moved: Any = value.to(device)
                state[name] = moved
