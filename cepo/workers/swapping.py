"""Offloads weights and optimizer state to host memory, block by block (by FSDP) or between the phases of a step.

With `fsdp.enable_cpu_offload` nothing is left to offload between phases. On a CPU, offloading does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
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
            logger.warning("offloading to host memory has no effect: the device is the CPU")

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
        self._copies: dict[str, Tensor] = {}
        if config.source != "actor" and not self._adapter_off:
            self._copies = {name: self._kept(parameter) for name, parameter in self._trainable()}

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Refreshes the copies after the update of the 0-based `step`."""
        if self._config.source == "snapshot" and (step + 1) % self._config.sync_every == 0:
            for name, parameter in self._trainable():
                self._copies[name].copy_(_local(parameter))
        elif self._config.source == "ema":
            for name, parameter in self._trainable():
                self._copies[name].lerp_(_local(parameter).float(), 1.0 - self._config.ema_decay)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the body with the teacher's weights, then restores the actor's weights bit for bit."""
        if not self._adapter_off and not self._copies:
            yield
            return
        reshard(self._module)
        if self._adapter_off:
            with self._module.model.disable_adapter():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
                try:
                    yield
                finally:  # PEFT switches gradients off and on again, which must affect the shards, not gathered copies
                    reshard(self._module)
            return
        live = {name: _local(parameter).clone() for name, parameter in self._trainable()}
        try:
            self._load(self._copies)
            yield
        finally:
            self._load(live)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the copies for a checkpoint, each placed in the whole weight like the shard of the trained weight."""
        if not self._copies:
            return {}
        reshard(self._module)
        return {name: _placed(self._copies[name].clone(), parameter) for name, parameter in self._trainable()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the result of `state_dict` on any number of ranks; the names must be the same."""
        assert state.keys() == self._copies.keys(), "the checkpoint keeps other teacher weights than this run"
        for name, copy in state.items():
            self._copies[name].copy_(_local(copy))

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        reshard(self._module)  # drops gathered copies of the previous weights
        for name, parameter in self._trainable():
            _local(parameter).copy_(weights[name])

    def _kept(self, parameter: nn.Parameter) -> Tensor:
        local = _local(parameter).clone()
        return local.float() if self._config.source == "ema" else local

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._module.named_parameters() if parameter.requires_grad)


def _local(parameter: Any) -> Tensor:
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def _placed(local: Tensor, parameter: Any) -> Tensor:
    """Returns `local` as this rank's shard of a tensor that is sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
