"""Defines the protocol between the trainer and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Unpack

from torch import Tensor

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringOptions, ScoringRow
from cepo.metrics import Metrics
from cepo.rollout.generator import Sampler


class Backend(Sampler, Protocol):
    """Samples, scores and updates on one device or many, and holds the weights.

    `generate` samples with the weights of the last synchronisation. Steps are 0-based.
    """

    generator_name: str

    def score(self, rows: Sequence[ScoringRow], **options: Unpack[ScoringOptions]) -> list[Tensor]:
        """Returns the log-prob, or another `result`, of each row's response tokens, (response length,) float32."""
        ...

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """Takes one optimizer step of the actor per batch."""
        ...

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the critic's value before each response token of each row."""
        ...

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics: ...

    def forget_work(self) -> None:
        """Excludes the work since the last update, such as a validation's, from the next step's `work/*` metrics."""

    def finish_step(self, step: int) -> None:
        """Refreshes teacher weights after the update of the step."""

    def synchronise_rollout(self) -> None:
        """Copies the actor's current weights to the rollout engine."""

    def save(self, folder: Path) -> None:
        """Saves weights, optimizer, teacher weights and random state in `folder/actor`, a critic in `folder/critic`."""

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...
