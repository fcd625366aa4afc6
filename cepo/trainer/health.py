"""Monitors a run: times its stages, and warns of equal rewards, missing answers and skipped updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from cepo.errors import EngineError
from cepo.metrics import Metrics, sum_value
from cepo.progress import Progress

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""Number of first steps after which a run warns if all their rewards were equal."""


class StageClock:
    """Sums wall-clock seconds and tokens of each stage between two calls of `drain`."""

    def __init__(self) -> None:
        self._metrics: Metrics = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Times the body as part of stage `name`. Stages may repeat, but a stage must not contain itself."""
        start = time.perf_counter()
        try:
            with Progress(name, None):
                yield
        finally:
            self._add(f"timing_s/{name}", time.perf_counter() - start)

    def count_tokens(self, name: str, tokens: int) -> None:
        """Counts tokens that stage `name` processed, including those of contexts if it computed them."""
        self._add(f"tokens/{name}", tokens)

    def drain(self) -> Metrics:
        """Returns the sums since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _add(self, name: str, value: float) -> None:
        added = sum_value(value)
        self._metrics[name] = self._metrics[name].merge(added) if name in self._metrics else added


class EqualRewards:
    """Warns once if all rewards of a run's first steps are equal."""

    def __init__(self) -> None:
        self._steps, self._responses = 0, 0
        self._values: set[float] = set()

    def see(self, rewards: Tensor) -> None:
        """Takes the rewards of a step's responses, of any shape; ignores them after the first steps."""
        if self._steps == FIRST_STEPS:
            return
        self._steps += 1
        self._responses += rewards.numel()
        self._values |= {float(reward) for reward in rewards.flatten()}
        if self._steps == FIRST_STEPS and len(self._values) == 1:
            (value,) = self._values
            logger.warning(
                "all %d responses of the first %d steps got the reward %g, so that nothing can be learnt. `cepo report` of "
                "the run folder shows responses with their reference answers; look at data.answer_key, data.format_prompt "
                "and data.max_response_length (cut responses have no answer), and at worker.reward.reward_function",
                self._responses,
                FIRST_STEPS,
                value,
            )


class MissingAnswers:
    """Warns once, at the first step in which most responses have no final answer to use as a reference."""

    def __init__(self) -> None:
        self._has_warned = False

    def see(self, num_missing: int, num_responses: int) -> None:
        """Takes the number of responses of a step, and the number of those without an answer."""
        if self._has_warned or 2 * num_missing <= num_responses:
            return
        self._has_warned = True
        logger.warning(
            "%d of %d responses (%.0f %%) have no final answer that a teacher could read. "
            "An answer is the last \\boxed{...} or <answer>...</answer>; for another format name a function in "
            "worker.reward.answer_function. Responses that data.max_response_length cuts have no answer either. "
            "references/responses_without_answer counts them at every step",
            num_missing,
            num_responses,
            100 * num_missing / num_responses,
        )


class SkippedUpdates:
    """Counts consecutive steps in which every update of the actor was skipped.

    Args:
        most: the run ends after this many such steps; -1 for never.
    """

    def __init__(self, most: int) -> None:
        self._most, self.steps_in_a_row, self._reason = most, 0, ""

    def see(
        self, step: int, num_skipped: float, num_updates: int, *, reason: str = "their gradients are not finite"
    ) -> None:
        """Takes the number of updates and skipped updates of the 1-based `step`; a step without updates is ignored."""
        if num_updates == 0:
            return
        if num_skipped < num_updates:
            self.steps_in_a_row = 0
            return
        self.steps_in_a_row += 1
        self._reason = reason
        if self.steps_in_a_row == 1:
            logger.warning(
                "step %d trained nothing: all of its %d updates were skipped, because %s (actor/skipped_updates). If this "
                "repeats, lower worker.actor.optim.lr and check the rewards. No checkpoint is written until an update "
                "succeeds%s",
                step,
                num_updates,
                reason,
                ""
                if self._most < 0
                else f", and after {self._most} such steps the run ends (trainer.max_skipped_steps)",
            )

    def require_an_update(self, folder: object) -> None:
        """Checks that updates have not been skipped in too many consecutive steps.

        Raises:
            EngineError: they have. The message names the run folder, whose checkpoints are from before those steps.
        """
        if 0 < self._most <= self.steps_in_a_row:
            raise EngineError(
                f"all updates of the last {self.steps_in_a_row} steps were skipped, because {self._reason}, so the "
                f"model no longer trains (trainer.max_skipped_steps={self._most}; -1 never stops). The checkpoints in {folder} "
                "were written before these steps; continue from one with a lower worker.actor.optim.lr"
            )

    def refuse_as_last(self, folder: object) -> None:
        """Raises the `EngineError` of a run whose last steps trained nothing; `folder` has the last step's weights."""
        raise EngineError(
            f"the run's last {self.steps_in_a_row} steps trained nothing: all their updates were skipped, because "
            f"{self._reason}. Its checkpoints were written before them. The weights after the last step are in {folder}; "
            "a run resumes from them only if trainer.load_checkpoint_path names that folder"
        )
