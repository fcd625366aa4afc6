"""What a run must remember beside weights; everything else is a function of the step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class TrainerState:
    """The trainer's part of a checkpoint.

    Attributes:
        step: training steps done.
        rounds: batches of problems taken from the data so far; more than `step` where online filtering asks again.
        kl_coefficient: the weight of the KL in the reward, which an adaptive controller moves.
    """

    step: int = 0
    rounds: int = 0
    kl_coefficient: float = 0.0
