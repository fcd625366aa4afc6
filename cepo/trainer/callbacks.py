"""Defines the callbacks that watch the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.errors import ConfigError, did_you_mean
from cepo.sections.registry import check_parameters

if TYPE_CHECKING:
    from cepo.trainer.batches import ScoredBatch
    from cepo.trainer.planning import ScoringPlan
    from cepo.trainer.rollouts import Rollouts
    from cepo.types import TokenSignal


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


_STAGES = [name for name in vars(Callback) if name.startswith("after_")]


class CallbackList(Callback):
    """Calls several callbacks in their order.

    Raises `ConfigError`: one is a class or no `Callback`, has no method that is called, a method `after_*`, `before_*` or `on_*`
    that is never called, or one with other parameters.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if isinstance(callbacks, Callback):
            raise ConfigError(f"callbacks is a list; write callbacks=[{type(callbacks).__name__}()]")
        for callback in callbacks:
            _check(callback)
        self._callbacks = callbacks

    def after_sample(self, rollouts: Rollouts) -> None:
        for callback in self._callbacks:
            callback.after_sample(rollouts)

    def after_plan(self, plan: ScoringPlan) -> None:
        for callback in self._callbacks:
            callback.after_plan(plan)

    def after_score(self, batch: ScoredBatch) -> None:
        for callback in self._callbacks:
            callback.after_score(batch)

    def after_estimate(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        for callback in self._callbacks:
            callback.after_estimate(batch, signal)

    def after_update(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        for callback in self._callbacks:
            callback.after_update(batch, signal)

    def after_record(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.after_record(step, metrics)

    def after_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.after_validate(step, metrics)


def _check(callback: object) -> None:
    if isinstance(callback, type):
        raise ConfigError(f"callbacks has the class {callback.__name__}; give an instance: {callback.__name__}()")
    if not isinstance(callback, Callback):
        raise ConfigError(f"callbacks has a {type(callback).__name__}; derive it from cepo.Callback")
    for name in dir(callback):
        is_hook = name.startswith(("after_", "before_", "on_")) and callable(getattr(callback, name))
        if is_hook and name not in _STAGES:
            raise ConfigError(
                f"{type(callback).__name__}.{name} is never called.{did_you_mean(name, _STAGES)} "
                f"Known: {', '.join(_STAGES)}"
            )
    kind = type(callback)
    of_the_class = [name for name in _STAGES if getattr(kind, name) is not getattr(Callback, name)]
    of_the_instance = [name for name in _STAGES if name in vars(callback)]
    if kind is not Callback and not of_the_class and not of_the_instance:
        raise ConfigError(f"{kind.__name__} has no function that is called. Known: {', '.join(_STAGES)}")
    check_parameters(kind)
