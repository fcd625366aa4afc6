"""Decides where a run starts, which steps it learns from, when it is saved, and what ends it or restarts its workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from cepo.config.schema import TrainerConfig
from cepo.errors import CepoError, CheckpointError, EngineError, WorkerLostError
from cepo.metrics import Metric, Metrics, fraction, max_value, sum_value
from cepo.run_folder.lock import RunLock
from cepo.terminal import interrupts
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.planning import ScoredBatch
from cepo.trainer.protocol import Backend
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)

LOG_PROB_GAP = "rollout/log_prob_gap_mean"
MODELS_NUMBERS = ("_loss", "/weight_norm")
"""The ends of the names of metrics that are finite after every update of a sound model with finite inputs."""
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

    def __init__(self, settings: TrainerConfig, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._in_a_row = {"repeated": 0, "empty": 0, "equal": 0}
        self._num_steps = self.skipped_in_a_row = 0
        self._found: dict[str, str] = {}
        self._reported: set[str] = set()
        self._has_bad_inputs = self._has_missed_answers = False
        self._why_skipped = ""
        self.metrics: Metrics = {}

    def may_update(self, batch: ScoredBatch, signal: TokenSignal) -> bool:
        """Checks a step before its update, and returns whether the update may be made.

        `health/nonfinite_log_probs` counts response tokens whose log-prob by the engine, the student or a teacher is
        not finite; `health/nonfinite_rewards` and `health/nonfinite_advantages` count tokens too.
        `health/repeated_fraction` and `health/empty_fraction` are shares of the responses. `health/equal_reward_steps`
        is the number of consecutive steps up to this one in which all responses got the same reward.
        """
        rollouts, total = batch.rollouts, len(batch.rollouts.generations)
        self.metrics, self._found = {}, {}
        for name, tensors in {
            "log_probs": [rollouts.sampled_log_probs, batch.old_log_probs, *batch.teacher_log_probs.values()],
            "rewards": [batch.token_level_rewards],
            "advantages": [signal.advantages],
        }.items():
            is_broken = torch.stack([~torch.isfinite(each) for each in tensors]).any(dim=0)
            number = int((is_broken & batch.response_mask).sum())
            self.metrics[f"health/nonfinite_{name}"] = sum_value(number)
            if number:
                self._found[name] = f"{number} {name.replace('_', '-')} are not finite"
        self._has_bad_inputs = bool(self._found)
        for name, number in {
            "repeated": sum(_repeats_one_token(each.response_ids) for each in rollouts.generations),
            "empty": sum(not text.strip() for text in rollouts.responses),
        }.items():
            self.metrics[f"health/{name}_fraction"] = fraction(number, total)
            self._count(name, number >= _COLLAPSED_SHARE * total)
        self.count_equal_rewards(rollouts.rewards)
        self.metrics["health/equal_reward_steps"] = max_value(self._in_a_row["equal"])
        words = {
            "repeated": "at least half of the responses of {} steps in a row repeat one token",
            "empty": "at least half of the responses of {} steps in a row are empty",
            "equal": f"all responses of {{}} steps in a row got the same reward, now {float(rollouts.rewards[0]):g}",
        }
        steps = self._settings.collapse_steps
        self._found |= {name: words[name].format(steps) for name, number in self._in_a_row.items() if number >= steps}
        self._report(rollouts.step + 1)
        return not self._found or self._settings.on_fault == "warn"

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
        num_missing, num_responses = round(missing.value), round(missing.weight)
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
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if num_skipped >= num_updates else 0
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
            self._report(step)
        self._reported &= self._found.keys()
        if self._found and self._settings.on_fault == "stop":
            raise EngineError(
                f"step {step}: {'; '.join(self._found.values())} (trainer.on_fault=stop; with warn the run would continue). "
                "The last checkpoint was written before this fault"
            )

    def require_updates(self) -> None:
        """Raises `EngineError` if updates were skipped in too many consecutive steps."""
        most = self._settings.max_skipped_steps
        if 0 < most <= self.skipped_in_a_row:
            raise EngineError(
                f"all updates of the last {self.skipped_in_a_row} steps were skipped, because {self._why_skipped} "
                f"(trainer.max_skipped_steps={most}; -1 never stops). The checkpoints in {self._folder} were written before "
                "these steps; continue from one with a lower worker.actor.optim.lr"
            )

    def _count(self, name: str, is_so: bool) -> None:
        self._in_a_row[name] = self._in_a_row[name] + 1 if is_so else 0

    def _report(self, step: int) -> None:
        for name in self._found.keys() - self._reported:
            logger.warning("step %d: %s (trainer.on_fault=%s)", step, self._found[name], self._settings.on_fault)
        self._reported |= self._found.keys()


def _repeats_one_token(ids: tuple[int, ...]) -> bool:
    """Returns whether the second half of a response, without its last token, repeats one token often enough."""
    half = ids[len(ids) // 2 : -1]
    return len(half) >= _SHORTEST_REPETITION and len(set(half)) == 1


class RunFinishedError(CepoError):
    """The run to resume has no steps left. The command ends without an error."""


class RunPolicy:
    """The policy of one command over all trainers that it builds, one after each loss of workers.

    As a context manager it holds the run folder: at once if the folder exists, so that a refused run leaves none, else
    when its `lock` is acquired.

    For `identity` and `decisive`, the `settings` there, see `CheckpointStore`. `state` is the current trainer's, which
    changes it; `checkpoint` is where it continues from, None for a start.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainerConfig,
        *,
        identity: Mapping[str, object],
        decisive: Mapping[str, object] | None = None,
        max_restarts: int = 0,
    ) -> None:
        only = settings.save_model_only
        self.store = CheckpointStore(
            folder, keep=settings.save_limit, identity=identity, settings=decisive, weights_only=only
        )
        self._settings, self._max_restarts, self.restarts, self.lock = settings, max_restarts, 0, RunLock(folder)
        self._first_step: int | None = None
        self._first_checkpoint: Path | None = None
        self._start(TrainerState(), None)

    def _start(self, state: TrainerState, checkpoint: Path | None) -> None:
        self.state, self.checkpoint, self.health = state, checkpoint, Health(self._settings, self.store.folder)
        self._last_saved, self._is_in_step = state.step, False

    def __enter__(self) -> RunPolicy:
        if self.store.folder.is_dir():
            self.lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def choose_start(self, *, data: str, total_steps: int, kl_coefficient: float) -> None:
        """Chooses the checkpoint, reads its state, and checks that the run may continue it, before an engine starts.

        `data` describes the training set's content, `kl_coefficient` is that of a run which starts at step 1.
        Raises `RunFinishedError`: all steps are done; `CheckpointError`: the checkpoint does not fit, or decisive settings
        have changed, but `trainer.accept_changes` is off or no steps are left.
        """
        self.store.settings["data"] = data
        checkpoint = self.checkpoint_to_load()
        state = TrainerState(kl_coefficient=kl_coefficient) if checkpoint is None else self.store.read(checkpoint)
        self._start(state, checkpoint)
        if checkpoint is None or self._first_step is not None:
            return
        step, settings, changes = state.step, self._settings, self.store.changes(checkpoint)
        listed = "".join(f"\n  {change}" for change in changes)
        anew = "trainer.experiment_name=<another> or trainer.find_last_checkpoint=false starts a new run"
        if step >= total_steps and not settings.val_only:
            if not changes:
                raise RunFinishedError(
                    f"{checkpoint}: all {total_steps} steps of this run are done; raise trainer.max_steps to add steps"
                )
            raise CheckpointError(
                f"all {total_steps} steps of this run are done ({checkpoint}), so these changes would train nothing:{listed}\n"
                f"{anew}; a larger trainer.max_steps with trainer.accept_changes=true continues with them"
            )
        if changes and not settings.accept_changes:
            raise CheckpointError(
                f"settings that decide what is trained have changed since {checkpoint}:{listed}\n"
                f"trainer.accept_changes=true continues with them; {anew}"
            )
        if changes:
            logger.warning("continuing from %s with changed settings (trainer.accept_changes):%s", checkpoint, listed)

    def checkpoint_to_load(self) -> Path | None:
        """Returns the configured checkpoint, else the folder's last; None for a start at step 1.

        After a loss of workers it is the last that the run wrote itself, else that from which the command started.
        """
        settings = self._settings
        if self._first_step is not None:
            own = None if settings.save_model_only else self.store.find_last(after=self._first_step)
            return own or self._first_checkpoint
        if settings.load_checkpoint_path is not None:
            return Path(settings.load_checkpoint_path).expanduser()
        return self.store.find_last() if settings.find_last_checkpoint else None

    def begin(self) -> int | None:
        """Notes that the engines run; returns the step after which the records continue, None for a new run's."""
        is_new = self.checkpoint is None and self._first_step is None
        if self._first_step is None:
            self._first_step, self._first_checkpoint = self.state.step, self.checkpoint
        return None if is_new else self.state.step

    def restart(self, error: WorkerLostError) -> None:
        """Counts a restart after a loss of workers; raises the error again if no restarts are left."""
        if self.restarts == self._max_restarts:
            raise error
        self.restarts += 1
        anew = self._settings.save_model_only
        where = "start from the beginning (trainer.save_model_only)" if anew else "continue from the last checkpoint"
        logger.warning(
            f"{error}\nrestart {self.restarts} of {self._max_restarts} (trainer.max_restarts): {self.state.step} steps were "
            f"done; new workers {where}"
        )

    @contextmanager
    def step(self) -> Generator[None]:
        """Surrounds a training step. With `trainer.save_on_interrupt` an interruption is raised at its end."""
        self._is_in_step = True
        with self._postponed(f"step {self.state.step + 1} is finished and saved first (trainer.save_on_interrupt)"):
            yield
        self._is_in_step = False
        interrupts.raise_if_lost()

    @property
    def metrics(self) -> Metrics:
        """The counts of the last step's faults, and of restarts if there were any."""
        return self.health.metrics | ({"faults/restarts": sum_value(self.restarts)} if self.restarts else {})

    @property
    def saves_interruption(self) -> bool:
        """Whether an interruption now is followed by a checkpoint: between steps, if some are not saved."""
        return self._settings.save_on_interrupt and not self._is_in_step and self.state.step > self._last_saved

    @property
    def is_save_due(self) -> bool:
        """Whether a multiple of `trainer.save_freq` has been reached since the last checkpoint."""
        every = self._settings.save_freq
        return every > 0 and self.state.step // every > self._last_saved // every

    def save(self, backend: Backend, *, val_reward_score: float | None, is_last: bool = False) -> None:
        """Saves a checkpoint of the current step; see `CheckpointStore.save`.

        If it cannot be written, the run continues and tries again after the next step; at the run's last step this is an
        error. While updates are being skipped nothing is written before that step, so that no good checkpoint is pruned.
        """
        if self.health.skipped_in_a_row and not is_last:
            return
        try:
            with self._postponed("the checkpoint is written first"):
                folder = self.store.save(self.state, backend, val_reward_score=val_reward_score)
        except CheckpointError as error:
            if is_last:
                raise
            logger.error("%s. The run continues and tries again after the next step", error)
        else:
            self._last_saved = self.state.step
            logger.info("checkpoint after step %d: %s", self.state.step, folder)
        if not is_last:
            interrupts.raise_if_lost()

    def how_to_resume(self) -> str:
        settings = self._settings
        if settings.save_model_only:
            anew = "the same command with trainer.find_last_checkpoint=false starts a new run"
            return f"checkpoints hold only weights (trainer.save_model_only), so no run can continue from them; {anew}"
        last = self.store.find_last()
        if last is None:
            often = f"trainer.save_freq is {settings.save_freq}; with a number of steps a run writes checkpoints while it trains"
            return f"no checkpoint was written yet, so the same command starts from the beginning ({often})"
        is_found = settings.find_last_checkpoint and settings.load_checkpoint_path is None
        how = "" if is_found else f" with trainer.load_checkpoint_path={last}"
        return f"the last complete checkpoint is {last}; the same command{how} resumes from it"

    def _postponed(self, what: str) -> AbstractContextManager[None]:
        return interrupts.postponed(what) if self._settings.save_on_interrupt else nullcontext()
