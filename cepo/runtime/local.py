"""The backend of one device: actor and generator in this process, so that a debugger sees everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
from cepo.metrics import Metrics
from cepo.rollout.base import Generation, GenerationRequest, Generator, SamplingSettings
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_actor, load_critic, save_actor, save_critic
from cepo.workers.critic import Critic


class LocalBackend:
    """`cepo.trainer.backend.Backend` over one actor, one generator and, for methods that need one, a critic."""

    def __init__(self, actor: Actor, generator: Generator, critic: Critic | None = None) -> None:
        self._actor, self._generator, self._critic = actor, generator, critic
        self.generator_name = generator.name

    def generate(self, requests: Sequence[GenerationRequest], settings: SamplingSettings) -> list[list[Generation]]:
        self._actor.rest()
        if self._critic is not None:
            self._critic.rest()
        return self._generator.generate(requests, settings)

    def score(self, rows: Sequence[ScoringRow], *, as_teacher: bool = False, keep_states: bool = False) -> list[Tensor]:
        return self._actor.score(rows, as_teacher=as_teacher, keep_states=keep_states)

    def score_reference(self, rows: Sequence[ScoringRow], *, keep_states: bool = False) -> list[Tensor]:
        return self._actor.score_reference(rows, keep_states=keep_states)

    def reference_divergence(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._actor.reference_divergence(rows)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        return self._actor.update(batches, step=step)

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._its_critic.values(rows)

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        return self._its_critic.update(batches, step=step)

    def finish_step(self, step: int) -> None:
        self._actor.finish_step(step)

    def synchronise_rollout(self) -> None:
        self._generator.sync_weights(self._actor.rollout_weights())

    def save(self, folder: Path) -> None:
        save_actor(self._actor, folder / "actor")
        if self._critic is not None:
            save_critic(self._critic, folder / "critic")

    def load(self, folder: Path) -> None:
        load_actor(self._actor, folder / "actor")
        if self._critic is not None:
            load_critic(self._critic, folder / "critic")

    def close(self) -> None:
        self._generator.close()

    @property
    def _its_critic(self) -> Critic:
        assert self._critic is not None, "a critic is built for methods with needs_values"
        return self._critic
