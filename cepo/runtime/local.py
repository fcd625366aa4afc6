"""The backend of one device: actor and generator in this process, so that a debugger sees everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.metrics import Metrics
from cepo.rollout.base import Generation, GenerationRequest, Generator, SamplingSettings
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_actor, save_actor


class LocalBackend:
    """`cepo.trainer.backend.Backend` over one actor and one generator."""

    def __init__(self, actor: Actor, generator: Generator) -> None:
        self._actor, self._generator = actor, generator
        self.generator_name = generator.name

    def generate(self, requests: Sequence[GenerationRequest], settings: SamplingSettings) -> list[list[Generation]]:
        return self._generator.generate(requests, settings)

    def score(self, rows: Sequence[ScoringRow], *, as_teacher: bool = False, keep_states: bool = False) -> list[Tensor]:
        return self._actor.score(rows, as_teacher=as_teacher, keep_states=keep_states)

    def score_reference(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._actor.score_reference(rows)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        return self._actor.update(batches, step=step)

    def finish_step(self, step: int) -> None:
        self._actor.finish_step(step)

    def synchronise_rollout(self) -> None:
        self._generator.sync_weights(self._actor.rollout_weights())

    def save(self, folder: Path) -> None:
        save_actor(self._actor, folder)

    def load(self, folder: Path) -> None:
        load_actor(self._actor, folder)

    def close(self) -> None:
        self._generator.close()
