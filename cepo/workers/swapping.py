"""Offloads weights and optimizer state to host memory, block by block (by FSDP) or between the phases of a step.

With `fsdp.enable_cpu_offload` nothing is left to offload between phases. On a CPU, offloading does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import FsdpConfig, OffloadConfig
from cepo.workers.distributed import reshard

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


def offload_policy(fsdp: FsdpConfig, device: torch.device) -> OffloadPolicy:
    """Returns FSDP's offload policy: with offloading, shards are in host memory and loaded block by block."""
    return CPUOffloadPolicy() if fsdp.enable_cpu_offload and device.type != "cpu" else OffloadPolicy()


class PhaseOffload:
    """Moves a worker's weights and optimizer state between its device and host memory.

    `load_weights` or `load_optimizer` must be called before each use; they load what was offloaded.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, config: OffloadConfig, fsdp: FsdpConfig, device: torch.device
    ) -> None:
        self._module, self._optimizer, self._device = module, optimizer, device
        can_move = device.type != "cpu" and not fsdp.enable_cpu_offload
        self._moves_weights = config.offload_params and can_move
        self._moves_optimizer = config.offload_optimizer and can_move
        self._weights_offloaded = False
        if (config.offload_params or config.offload_optimizer or fsdp.enable_cpu_offload) and device.type == "cpu":
            logger.warning("fsdp.enable_cpu_offload and offload.* have no effect: the device is the CPU")

    def load_weights(self) -> None:
        if self._weights_offloaded:
            self._module.to(self._device)
            self._weights_offloaded = False

    def offload_weights(self) -> None:
        """Moves the shards to host memory and frees gathered copies and gradients."""
        if not self._moves_weights or self._weights_offloaded:
            return
        reshard(self._module)
        self._optimizer.zero_grad(set_to_none=True)
        self._module.to(_HOST)
        self._weights_offloaded = True
        torch.cuda.empty_cache()

    def load_optimizer(self) -> None:
        if self._moves_optimizer:
            move_state(self._optimizer, self._device)

    def offload_optimizer(self) -> None:
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


class TeacherWeights:
    """Copies of the trainable weights that can replace the actor's weights during a pass.

    The source `actor` needs no copy. `reference` keeps the initial weights or, under LoRA, disables the adapter.
    `snapshot` is refreshed after every update whose 1-based step is divisible by `sync_every`. `ema` computes
    `c <- decay c + (1 - decay) theta` after every update, in float32 whatever the model's type; under LoRA it averages
    the factors, not their product. Each rank keeps copies of its own shards.
    """

    def __init__(self, module: nn.Module, config: TeacherConfig) -> None:
        self._module, self._config = module, config
        self._adapter_off = config.source == "reference" and hasattr(module.model, "disable_adapter")
        self._copies: dict[str, DTensor] = {}
        if config.source != "actor" and not self._adapter_off:
            kind = torch.float32 if config.source == "ema" else None
            self._copies = {name: weight.to(kind or weight.dtype, copy=True) for name, weight in self._trained()}

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Refreshes the copies after the update of the 0-based `step`."""
        if self._config.source == "snapshot" and (step + 1) % self._config.sync_every == 0:
            for name, weight in self._trained():
                self._copies[name].copy_(weight)
        elif self._config.source == "ema":
            for name, weight in self._trained():
                self._copies[name].to_local().lerp_(weight.to_local().float(), 1.0 - self._config.ema_decay)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the body with the teacher's weights, then restores the actor's weights bit for bit."""
        if self._adapter_off:
            reshard(self._module)
            with self._module.model.disable_adapter():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
                try:
                    yield
                finally:  # PEFT switches gradients off and on again, which must affect the shards, not gathered copies
                    reshard(self._module)
        elif not self._copies:
            yield
        else:
            live = {name: weight.clone() for name, weight in self._trained()}
            try:
                self._load(self._copies)
                yield
            finally:
                self._load(live)

    def state_dict(self) -> dict[str, DTensor]:
        """Returns the copies, sharded like the trained weights; restoring a checkpoint writes to them."""
        return self._copies

    def _load(self, weights: dict[str, DTensor]) -> None:
        for name, weight in self._trained():
            weight.copy_(weights[name])

    def _trained(self) -> list[tuple[str, Any]]:
        """Returns the trained weights' shards by name, without gradient."""
        reshard(self._module)  # drops gathered copies, whose changes would be lost
        named = self._module.named_parameters()
        return [(name, parameter.detach()) for name, parameter in named if parameter.requires_grad]
