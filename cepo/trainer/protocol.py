"""The protocol between the trainer and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
from cepo.metrics import Metrics
from cepo.rollout.generator import Sampler


class Backend(Sampler, Protocol):
    """Generates, scores, updates and keeps the policy's state, on one device or on many.

    `generate` samples from the weights of the last synchronisation.
    """

    generator_name: str

    def score(
        self,
        rows: Sequence[ScoringRow],
        *,
        as_teacher: bool = False,
        keep_states: str | None = None,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """Returns log P of each row's response tokens under its context, with the actor's or the teacher's weights.

        `keep_states` names the view whose rows' hidden states are kept until `finish_step`, for an update that distils
        from them. `temperature` replaces the rollout temperature.
        """
        ...

    def score_reference(self, rows: Sequence[ScoringRow], *, keep_states: bool = False) -> list[Tensor]:
        """Scores as `score` does, with the initial weights, for a KL penalty."""
        ...

    def reference_divergence(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the KL over the vocabulary from the reference states that were kept for these rows."""
        ...

    def entropies(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the entropy in nats of the distribution that each of the rows' response tokens was drawn from."""
        ...

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """Takes one optimizer step per batch at the 0-based training step."""
        ...

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the critic's value before each of the rows' response tokens."""
        ...

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        """Takes one optimizer step of the critic per batch."""
        ...

    def forget_work(self) -> None:
        """Excludes the work since the last update, done for a validation, from the next step's `work/*`."""
        ...

    def finish_step(self, step: int) -> None:
        """Refreshes teacher weights after the update of the 0-based step."""
        ...

    def synchronise_rollout(self) -> None:
        """Gives the rollout engine the actor's current weights."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer, teacher weights and random state into `folder/actor`, a critic's into `folder/critic`."""
        ...

    def load(self, folder: Path) -> None:
        """Restores exactly what `save` wrote."""
        ...

    def close(self) -> None:
        """Frees devices and engines."""
        ...
