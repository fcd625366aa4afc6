"""Lets a program watch a run: callbacks are called after each stage of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cepo.trainer.asking import Rollouts
    from cepo.trainer.planning import ScoredBatch, ScoringPlan
    from cepo.types import TokenSignal


class Callback:
    """Is called after each stage of a training step; a subclass overrides the methods that it needs.

    Callbacks run in the process that called `cepo.train`, in the order of the list. They must not change the values that they
    get. An exception ends the run, which resumes from its last checkpoint when it is started again.
    """

    def after_ask(self, rollouts: Rollouts) -> None:
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
