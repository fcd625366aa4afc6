"""Defines what a trainer is connected to: the devices that it trains on, and the callbacks that watch its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # only: a program that defines a callback loads no library before its configuration is checked
    from torch import Tensor

    from cepo.data.batch import CriticBatch, InitialScores, OptimizerBatch, ScoringRow
    from cepo.metrics import Metrics
    from cepo.rollout.generator import Generation, GenerationRequest, OnFinished, SamplingSettings
    from cepo.trainer.batches import ScoredBatch
    from cepo.trainer.planning import ScoringPlan
    from cepo.trainer.rollouts import Rollouts
    from cepo.types import TokenSignal


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
        self, rows: Sequence[ScoringRow], *, keep_states: str | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        """Returns the log-probs of each row's response tokens under the actor's weights, (response length,) float32.

        The update of the step can distil from rows of the view `keep_states`. `temperature` replaces the rollout's.
        """
        ...

    def score_teacher(self, rows: Sequence[ScoringRow], *, keep_states: str | None = None) -> list[Tensor]:
        """Does the same under the teacher's weights, where they are not the actor's."""
        ...

    def score_initial(self, rows: Sequence[ScoringRow], *, with_kl: bool = False) -> list[InitialScores]:
        """Returns log-probs under the initial weights, and with `with_kl` each token's KL from the actor's."""
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


class Callback:
    """Is called after each stage of a training step; a subclass overrides the methods that it needs.

    Callbacks run in the process that called `cepo.train`, in the order of the list. They must not change the values that they
    get. An exception ends the run, which resumes from its last checkpoint when it is started again.
    """

    def after_sample(self, rollouts: Rollouts) -> None:
        """Responses were sampled and rewarded; `rollouts.step` is 0-based."""

    def after_plan(self, plan: ScoringPlan) -> None:
        """It was decided which rows learn, and what their teachers read."""

    def after_score(self, batch: ScoredBatch) -> None:
        """The student's and the teachers' log-probs were computed: (B, T) in nats, 0 on padding."""

    def after_estimate(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        """The method computed what each token learns: `signal.advantages` (B, T)."""

    def after_update(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        """The weights were updated, or a step with a fault was left out."""

    def after_record(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the 1-based step `step` were written."""

    def after_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out problems were answered after `step` steps (0: before training)."""
