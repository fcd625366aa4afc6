"""Keeps the weights of a teacher that are not the actor's current ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cepo.algorithms.settings import TeacherConfig
from cepo.workers.distributed import reshard


class TeacherWeights:
    """Copies of the trainable weights that can replace the actor's weights during a pass.

    The source `actor` needs no copy. `reference` keeps the initial weights or, under LoRA, disables the adapter.
    `snapshot` is refreshed after every update whose 1-based step is divisible by `sync_every`. `ema` computes
    `c <- decay c + (1 - decay) theta` after every update, in float32 whatever the model's type; under LoRA it averages
    the factors, not their product. Each rank keeps `copies` of its own shards; restoring a checkpoint writes to them.
    """

    def __init__(self, module: nn.Module, config: TeacherConfig) -> None:
        self._module = module
        self._config = config
        self._adapter_off = config.source == "reference" and hasattr(module.model, "disable_adapter")
        self.copies: dict[str, DTensor] = {}
        if config.source == "actor" or self._adapter_off:
            return
        for name, weight in self._trained():
            dtype = torch.float32 if config.source == "ema" else weight.dtype
            self.copies[name] = weight.to(dtype, copy=True)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Refreshes the copies after the update of the 0-based `step`."""
        num_steps = step + 1
        if self._config.source == "snapshot" and num_steps % self._config.sync_every == 0:
            for name, weight in self._trained():
                self.copies[name].copy_(weight)
        elif self._config.source == "ema":
            share_of_actor = 1.0 - self._config.ema_decay
            for name, weight in self._trained():
                average = self.copies[name].to_local()
                actor_weight = weight.to_local().float()
                average.lerp_(actor_weight, share_of_actor)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Makes copies that follow the actor equal to it, as at the start of a run."""
        if self._config.source in ("snapshot", "ema"):
            for name, weight in self._trained():
                self.copies[name].copy_(weight)

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
        elif not self.copies:
            yield
        else:
            live = {name: weight.clone() for name, weight in self._trained()}
            try:
                self._load(self.copies)
                yield
            finally:
                self._load(live)

    def _load(self, weights: dict[str, DTensor]) -> None:
        for name, weight in self._trained():
            weight.copy_(weights[name])

    def _trained(self) -> list[tuple[str, Any]]:
        """Returns the trained weights' shards by name, without gradient."""
        reshard(self._module)  # drops gathered copies, whose changes would be lost
        trained: list[tuple[str, Any]] = []
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                trained.append((name, parameter.detach()))
        return trained
