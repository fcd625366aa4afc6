"""Defines what a trainer is connected to: the devices that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # only: a program that defines a callback loads no library before its configuration is checked
    from torch import Tensor

    from cepo.data.batch import CriticBatch, Kept, OptimizerBatch, ScoringRow
    from cepo.metrics import Metrics
    from cepo.rollout.generator import Generation, GenerationRequest, OnFinished, SamplingSettings


class Backend(Protocol):
    """Samples, scores and updates on one device or many, and holds the weights.

    `generate` samples with the weights of the last synchronisation. Steps are 0-based.
    """

    generator_name: str

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        """Samples responses; see `cepo.rollout.generator.Sampler`."""
        ...

    def score(
        self, rows: Sequence[ScoringRow], *, keep: Kept | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        """Returns the log-probs of each row's response tokens under the actor's weights, (response length,) float32.

        The update of the step can distil from what is kept. `temperature` replaces the rollout's.
        """
        ...

    def score_teacher(self, rows: Sequence[ScoringRow], *, keep: Kept | None = None) -> list[Tensor]:
        """Does the same under the teacher's weights, where they are not the actor's."""
        ...

    def score_initial(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Does the same under the initial weights, for a KL penalty."""
        ...

    def entropies(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the entropy of the actor's distribution before each response token, in nats."""
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
