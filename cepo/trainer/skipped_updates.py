"""What is done where updates are skipped because no gradient is finite: a warning at once, an end after several steps."""

from __future__ import annotations

import logging

from cepo.errors import EngineError

logger = logging.getLogger(__name__)


class SkippedUpdates:
    """Counts steps in a row of which every update of the actor was skipped.

    Args:
        most: the run ends at that many; -1: never.
    """

    def __init__(self, most: int) -> None:
        self._most, self.steps_in_a_row = most, 0

    def see(self, step: int, num_skipped: float, num_updates: int) -> None:
        """The updates of the 1-based `step`; one without any says nothing."""
        if num_updates == 0:
            return
        if num_skipped < num_updates:
            self.steps_in_a_row = 0
            return
        self.steps_in_a_row += 1
        if self.steps_in_a_row == 1:
            logger.warning(
                "step %d trained nothing: all of its %d updates were skipped, because their gradients are not finite "
                "(actor/skipped_updates). If more follow, lower worker.actor.optim.lr and look at the rewards. No checkpoint "
                "is written on the way until an update succeeds%s",
                step,
                num_updates,
                ""
                if self._most < 0
                else f", and after {self._most} such steps the run ends (trainer.max_skipped_steps)",
            )

    def require_an_update(self, folder: object) -> None:
        """Ends the run where too many steps in a row trained nothing.

        Raises:
            EngineError: with the run folder, whose checkpoints are those of steps that trained.
        """
        if 0 < self._most <= self.steps_in_a_row:
            raise EngineError(
                f"all updates of the last {self.steps_in_a_row} steps were skipped, because their gradients are not finite, so "
                f"that nothing is trained any more (trainer.max_skipped_steps={self._most}; -1 goes on). The checkpoints in "
                f"{folder} are those of before; go on from one with a lower worker.actor.optim.lr"
            )
