"""A warning where the first steps give nothing to learn from: every response got the same reward."""

from __future__ import annotations

import logging

from torch import Tensor

logger = logging.getLogger(__name__)

_STEPS = 3


class EqualRewards:
    """Looks at the rewards of a run's first steps, and warns once if all of them are the same number."""

    def __init__(self) -> None:
        self._steps, self._responses = 0, 0
        self._values: set[float] = set()

    def see(self, rewards: Tensor) -> None:
        """The rewards of a step's responses, of any shape; None are looked at after the first steps."""
        if self._steps == _STEPS:
            return
        self._steps += 1
        self._responses += rewards.numel()
        self._values |= set(rewards.flatten().tolist())
        if self._steps == _STEPS and len(self._values) == 1:
            (value,) = self._values
            logger.warning(
                "all %d responses of the first %d steps got the reward %g, so that nothing can be learnt. rollouts.jsonl in "
                "the run folder shows responses with their reference answers; look at data.answer_key, data.format_prompt "
                "and data.max_response_length (cut responses have no answer), and at worker.reward.reward_function",
                self._responses,
                _STEPS,
                value,
            )
