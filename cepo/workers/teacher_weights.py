"""Manages the weights of teacher passes: the actor's current or initial weights, a snapshot or a moving average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cepo.algorithms.settings import TeacherConfig
from cepo.workers.distributed import reshard


class TeacherWeights:
    """Copies of the trainable weights that can replace the actor's weights during a pass.

    The source `actor` needs no copy. `reference` keeps the initial weights or, under LoRA, disables the adapter.
    `snapshot` is refreshed after every update whose 1-based step is divisible by `sync_every`. `ema` computes
    `c <- decay c + (1 - decay) theta` after every update, in float32 whatever the model's type; under LoRA it averages
    the factors, not their product. Each rank keeps copies of its own shards.
    """

    def __init__(self, module: nn.Module, config: TeacherConfig) -> None:
        self._module, self._config = module, config
        self._adapter_off = config.source == "reference" and _has_adapter(module)
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
                finally:
                    reshard(
                        self._module
                    )  # PEFT switches gradients off and on again, which must affect the shards, not gathered copies
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


def _has_adapter(module: Any) -> bool:
    return hasattr(module.model, "disable_adapter")
