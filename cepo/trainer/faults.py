"""Detects non-finite numbers and signs of collapse in each step, reports them, and applies `trainer.on_fault`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cepo.config.trainer_schema import TrainerConfig
from cepo.errors import EngineError
from cepo.metrics import Metrics, fraction, max_value, sum_value
from cepo.trainer.asking import Rollouts
from cepo.trainer.scoring import ScoredBatch
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)

LOG_PROB_GAP = "rollout/log_prob_gap_mean"
MODELS_NUMBERS = ("_loss", "/weight_norm")
"""The ends of the names of metrics that are finite after every update of a sound model with finite inputs."""
_COLLAPSED_SHARE = 0.5
"""Share of a step's responses that must be empty, or repeat one token, for the step to count as collapsed."""
_SHORTEST_REPETITION = 4


class FaultWatch:
    """Watches the steps of a run for faults.

    Non-finite numbers, and a log-prob gap of the engine above `trainer.max_log_prob_gap`, are faults at once. Empty or
    repetitive responses and equal rewards are faults after `trainer.collapse_steps` consecutive steps.

    Attributes:
        metrics: the counts of the last step; see `before_update`.
    """

    def __init__(self, settings: TrainerConfig) -> None:
        self._settings = settings
        self._in_a_row = {"repeated": 0, "empty": 0, "equal": 0}
        self._found: dict[str, str] = {}
        self._has_bad_inputs = False
        self._told: set[str] = set()
        self.metrics: Metrics = {}

    def before_update(self, batch: ScoredBatch, signal: TokenSignal) -> bool:
        """Checks a step before its update, and returns whether the update may be made.

        `health/nonfinite_log_probs` counts response tokens whose log-prob by the engine, the student or a teacher is
        not finite; `health/nonfinite_rewards` and `health/nonfinite_advantages` count tokens too.
        `health/repeated_fraction` and `health/empty_fraction` are shares of the responses. `health/equal_reward_steps`
        is the number of consecutive steps up to this one in which all responses got the same reward.
        """
        rollouts = batch.rollouts
        log_probs = [rollouts.sampled_log_probs, batch.old_log_probs, *batch.teacher_log_probs.values()]
        counts = {
            "log_probs": _num_not_finite(log_probs, rollouts.response_mask),
            "rewards": _num_not_finite([batch.token_level_rewards], rollouts.response_mask),
            "advantages": _num_not_finite([signal.advantages], rollouts.response_mask),
        }
        shares = {
            "repeated": sum(map(_repeats_one_token, (each.response_ids for each in rollouts.generations))),
            "empty": sum(not text.strip() for text in rollouts.responses),
        }
        total = len(rollouts.generations)
        self._count("equal", bool((rollouts.rewards == rollouts.rewards[0]).all()))
        for name, number in shares.items():
            self._count(name, number >= _COLLAPSED_SHARE * total)
        self.metrics = {
            **{f"health/nonfinite_{name}": sum_value(number) for name, number in counts.items()},
            **{f"health/{name}_fraction": fraction(number, total) for name, number in shares.items()},
            "health/equal_reward_steps": max_value(self._in_a_row["equal"]),
        }
        self._has_bad_inputs = any(counts.values())
        self._found = {
            f"nonfinite {name}": f"{number} {name.replace('_', '-')} are not finite"
            for name, number in counts.items()
            if number
        } | self._collapse(rollouts)
        self._tell(rollouts.step + 1)
        return not self._found or self._settings.on_fault == "warn"

    def after_update(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of the 1-based `step` after they have been recorded.

        Raises:
            EngineError: the step has a fault and `trainer.on_fault` is stop; or, whatever it is, the update broke the
                model: a weight, or a loss of finite inputs, is not finite.
        """
        broken = [name for name, value in values.items() if name.endswith(MODELS_NUMBERS) and not math.isfinite(value)]
        if broken and not (self._has_bad_inputs and all(name.endswith("_loss") for name in broken)):
            raise EngineError(
                f"step {step}: {' and '.join(broken)} {'is' if len(broken) == 1 else 'are'} not finite, so the model is "
                "broken. The last checkpoint was written before this step; continue from it with a lower "
                "worker.actor.optim.lr"
            )
        gap, most = values.get(LOG_PROB_GAP, 0.0), self._settings.max_log_prob_gap
        if not gap <= most:
            self._found["gap"] = (
                f"the log-probs of rollout engine and trainer differ by {gap:.3g} nats a token ({LOG_PROB_GAP}), more than "
                f"trainer.max_log_prob_gap={most:g}"
            )
            self._tell(step)
        self._told &= self._found.keys()
        if self._found and self._settings.on_fault == "stop":
            raise EngineError(
                f"step {step}: {'; '.join(self._found.values())} (trainer.on_fault=stop; with warn the run would continue). "
                "The last checkpoint was written before this fault"
            )

    def _count(self, name: str, is_so: bool) -> None:
        self._in_a_row[name] = self._in_a_row[name] + 1 if is_so else 0

    def _collapse(self, rollouts: Rollouts) -> dict[str, str]:
        steps = self._settings.collapse_steps
        words = {
            "repeated": f"at least half of the responses of {steps} steps in a row repeat one token",
            "empty": f"at least half of the responses of {steps} steps in a row are empty",
            "equal": f"all responses of {steps} steps in a row got the same reward, now {float(rollouts.rewards[0]):g}",
        }
        return {name: words[name] for name, number in self._in_a_row.items() if number >= steps}

    def _tell(self, step: int) -> None:
        for name in self._found.keys() - self._told:
            logger.warning("step %d: %s (trainer.on_fault=%s)", step, self._found[name], self._settings.on_fault)
        self._told |= self._found.keys()


def _num_not_finite(tensors: Iterable[Tensor], mask: Tensor) -> int:
    broken = torch.stack([~torch.isfinite(each) for each in tensors]).any(dim=0)
    return int((broken & mask).sum())


def _repeats_one_token(ids: tuple[int, ...]) -> bool:
    """Returns whether the second half of a response, without its last token, repeats one token often enough."""
    half = ids[len(ids) // 2 : -1]
    return len(half) >= _SHORTEST_REPETITION and len(set(half)) == 1
