"""Watches the steps of a run: which to learn from, and when it can no longer learn."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cepo.config.schema import TrainerConfig
from cepo.data.batch import TokenIds
from cepo.errors import EngineError
from cepo.metrics import Metric, Metrics, fraction, max_value, sum_value
from cepo.trainer.batches import ScoredBatch
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)

LOG_PROB_GAP = "rollout/log_prob_gap_mean"
MODELS_NUMBERS = ("_loss", "/weight_norm")
"""The ends of the names of metrics that are finite after every update of a sound model with finite inputs."""
NOTABLE_GAP = 0.1
"""Mean gap between the log-probs of engine and trainer in nats per token from which a run warns; bf16 explains 0.02."""
FIRST_STEPS = 3
"""Number of first steps after which a run warns if the rewards of each were equal."""
NOT_FINITE = "their gradients are not finite"
_COLLAPSED_SHARE = 0.5
"""Share of a step's responses that must be empty, or repeat one token, for the step to count as collapsed."""
_SHORTEST_REPETITION = 4


class Health:
    """Decides whether a step is learnt from, and whether the run continues.

    Non-finite numbers, and a log-prob gap of the engine above `trainer.max_log_prob_gap`, are faults at once. Empty or
    repetitive responses and equal rewards are faults after `trainer.collapse_steps` consecutive steps.
    `trainer.on_fault` is applied to faults.

    Attributes:
        metrics: the counts of the last step; see `may_update`.
        skipped_in_a_row: number of consecutive steps in which every update of the actor was skipped.
    """

    def __init__(self, settings: TrainerConfig) -> None:
        self._settings = settings
        self.metrics: Metrics = {}
        self.skipped_in_a_row = 0
        self._why_skipped = ""
        self._num_steps = 0
        self._in_a_row = {"repeated": 0, "empty": 0, "equal": 0}  # consecutive steps, up to the last one
        self._faults: dict[str, str] = {}  # of the last step, in words
        self._reported: set[str] = set()
        self._has_bad_inputs = False
        self._has_missed_answers = False
        self._has_warned_of_gap = False

    def may_update(self, batch: ScoredBatch, signal: TokenSignal) -> bool:
        """Checks a step before its update, and returns whether the update may be made.

        `health/nonfinite_log_probs` counts response tokens whose log-prob by the engine, the student or a teacher is
        not finite; `health/nonfinite_rewards` and `health/nonfinite_advantages` count tokens too.
        `health/repeated_fraction` and `health/empty_fraction` are shares of the responses. `health/equal_reward_steps`
        is the number of consecutive steps up to this one in which all responses got the same reward.
        """
        rollouts = batch.rollouts
        self.metrics = {}
        self._faults = {}
        log_probs = [rollouts.sampled_log_probs, batch.old_log_probs, *batch.teacher_log_probs.values()]
        self._count_nonfinite("log_probs", log_probs, batch.response_mask)
        self._count_nonfinite("rewards", [batch.token_level_rewards], batch.response_mask)
        self._count_nonfinite("advantages", [signal.advantages], batch.response_mask)
        self._has_bad_inputs = bool(self._faults)
        num_repeated = sum(_repeats_one_token(generation.response_ids) for generation in rollouts.generations)
        num_empty = sum(not text.strip() for text in rollouts.responses)
        self._count_collapsed("repeated", num_repeated, len(rollouts.generations))
        self._count_collapsed("empty", num_empty, len(rollouts.generations))
        self.count_equal_rewards(rollouts.rewards)
        self.metrics["health/equal_reward_steps"] = max_value(self._in_a_row["equal"])
        steps = self._settings.collapse_steps
        words = {
            "repeated": f"at least half of the responses of {steps} steps in a row repeat one token",
            "empty": f"at least half of the responses of {steps} steps in a row are empty",
            "equal": f"all responses of {steps} steps in a row got the same reward, now {float(rollouts.rewards[0]):g}",
        }
        for name, number in self._in_a_row.items():
            if number >= steps:
                self._faults[name] = words[name]
        self._report(rollouts.step + 1)
        return not self._faults or self._settings.on_fault == "warn"

    def _count_nonfinite(self, name: str, tensors: Sequence[Tensor], response_mask: Tensor) -> None:
        """Counts response tokens with a value that is not finite in one of the (B, T) tensors, which is a fault."""
        broken: list[Tensor] = []  # hardly ever any, and each is as large as the batch
        for tensor in tensors:
            is_finite = torch.isfinite(tensor)
            if not is_finite.all():
                broken.append(~is_finite)
        number = 0
        if broken:
            number = int((torch.stack(broken).any(dim=0) & response_mask).sum())
        self.metrics[f"health/nonfinite_{name}"] = sum_value(number)
        if number:
            self._faults[name] = f"{number} {name.replace('_', '-')} are not finite"

    def _count_collapsed(self, name: str, number: int, total: int) -> None:
        self.metrics[f"health/{name}_fraction"] = fraction(number, total)
        self._count(name, number >= _COLLAPSED_SHARE * total)

    def count_equal_rewards(self, rewards: Tensor) -> None:
        """Warns if in each of a run's first steps all rewards, (B,), were equal."""
        self._num_steps += 1
        self._count("equal", bool((rewards == rewards[0]).all()))
        if self._num_steps == self._in_a_row["equal"] == FIRST_STEPS:
            logger.warning(
                f"in each of the first {FIRST_STEPS} steps all responses got the same reward, now {float(rewards[0]):g}, so "
                "that nothing can be learnt. `cepo report` of the run folder shows responses with their reference answers; look "
                "at data.answer_key, data.format_prompt, worker.reward.reward_function and data.max_response_length (cut "
                "responses have no answer)"
            )

    def count_missing_answers(self, missing: Metric) -> None:
        """Warns once, at the first step in which most responses have no final answer to use as a reference."""
        num_missing = round(float(missing.value))
        num_responses = round(float(missing.weight))
        if self._has_missed_answers or 2 * num_missing <= num_responses:
            return
        self._has_missed_answers = True
        logger.warning(
            f"{num_missing} of {num_responses} responses ({100 * num_missing / num_responses:.0f} %) have no final answer that a "
            "teacher could read (references/responses_without_answer). An answer is the last \\boxed{...} or "
            "<answer>...</answer>; for another format name a function in worker.reward.answer_function. Responses that "
            "data.max_response_length cuts have no answer either"
        )

    def count_skipped(self, step: int, num_skipped: float, num_updates: int, *, why: str = NOT_FINITE) -> None:
        """Counts the 1-based `step` if all of its updates were skipped; a step without updates changes nothing."""
        if num_updates == 0:
            return
        if num_skipped >= num_updates:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
        self._why_skipped = why
        if self.skipped_in_a_row == 1:
            most = self._settings.max_skipped_steps
            ending = f", and after {most} such steps the run ends (trainer.max_skipped_steps)" if most >= 0 else ""
            logger.warning(
                f"step {step} trained nothing: all of its {num_updates} updates were skipped, because {why} "
                "(actor/skipped_updates). If this repeats, lower worker.actor.optim.lr and check the rewards. No checkpoint "
                f"is written until an update succeeds or the run's steps are done{ending}"
            )

    def require_sound(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of the 1-based `step` after they have been recorded.

        Raises `EngineError`: the step has a fault and `trainer.on_fault` is stop; or, whatever that is, a weight, or a
        loss of finite inputs, is not finite.
        """
        broken = [name for name, value in values.items() if name.endswith(MODELS_NUMBERS) and not math.isfinite(value)]
        has_broken_weights = any(not name.endswith("_loss") for name in broken)
        if has_broken_weights or (broken and not self._has_bad_inputs):
            verb = "is" if len(broken) == 1 else "are"
            raise EngineError(
                f"step {step}: {' and '.join(broken)} {verb} not finite, so the model is "
                "broken. The last checkpoint was written before this step; continue from it with a lower "
                "worker.actor.optim.lr"
            )
        gap = values.get(LOG_PROB_GAP, 0.0)
        most = self._settings.max_log_prob_gap
        if math.isnan(gap) or gap > most:
            self._faults["gap"] = (
                f"the log-probs of rollout engine and trainer differ by {gap:.3g} nats a token ({LOG_PROB_GAP}), more than "
                f"trainer.max_log_prob_gap={most:g}"
            )
            self._report(step)
        elif gap >= NOTABLE_GAP:
            self._warn_of_gap(step, gap)
        self._reported &= self._faults.keys()
        if self._faults and self._settings.on_fault == "stop":
            raise EngineError(
                f"step {step}: {'; '.join(self._faults.values())} (trainer.on_fault=stop; with warn the run would continue). "
                "The last checkpoint was written before this fault"
            )

    def _warn_of_gap(self, step: int, gap: float) -> None:
        """Warns once per run of a gap that rounding does not explain, but that is no fault by the settings."""
        if self._has_warned_of_gap:
            return
        self._has_warned_of_gap = True
        logger.warning(
            f"step {step}: the log-probs of rollout engine and trainer differ by {gap:.3g} nats a token ({LOG_PROB_GAP}); "
            f"rounding in bf16 explains about 0.02. From trainer.max_log_prob_gap={self._settings.max_log_prob_gap:g} on it is a "
            "fault. worker.rollout.name=transformers shows whether vLLM is the cause; worker.actor.rollout_is=truncate "
            "corrects for the gap"
        )

    def require_updates(self) -> None:
        """Raises `EngineError` if updates were skipped in too many consecutive steps."""
        most = self._settings.max_skipped_steps
        folder = self._settings.run_folder
        if 0 < most <= self.skipped_in_a_row:
            raise EngineError(
                f"all updates of the last {self.skipped_in_a_row} steps were skipped, because {self._why_skipped} "
                f"(trainer.max_skipped_steps={most}; -1 never stops). The checkpoints in {folder} were written before "
                "these steps; continue from one with a lower worker.actor.optim.lr"
            )

    def _count(self, name: str, is_so: bool) -> None:
        if is_so:
            self._in_a_row[name] += 1
        else:
            self._in_a_row[name] = 0

    def _report(self, step: int) -> None:
        """Warns of the faults that earlier steps did not have."""
        for name in self._faults.keys() - self._reported:
            logger.warning("step %d: %s (trainer.on_fault=%s)", step, self._faults[name], self._settings.on_fault)
        self._reported |= self._faults.keys()


def _repeats_one_token(ids: TokenIds) -> bool:
    """Returns whether the second half of a response, without its last token, repeats one token often enough."""
    half = ids[len(ids) // 2 : -1]
    return len(half) >= _SHORTEST_REPETITION and bool((half == half[0]).all())
