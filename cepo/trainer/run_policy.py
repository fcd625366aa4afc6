"""Decides where a run starts, when it is saved, and what ends it or restarts its workers."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from cepo.config.schema import TrainerConfig
from cepo.errors import CepoError, CheckpointError, WorkerLostError
from cepo.metrics import Metrics, sum_value
from cepo.run_folder.lock import RunLock
from cepo.terminal import interrupts
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.health import Health
from cepo.trainer.protocol import Backend

logger = logging.getLogger(__name__)


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
        settings: TrainerConfig,
        *,
        identity: Mapping[str, object],
        decisive: Mapping[str, object] | None = None,
    ) -> None:
        self.store = CheckpointStore(
            settings.run_folder,
            keep=settings.save_limit,
            identity=identity,
            settings=decisive,
            weights_only=settings.save_model_only,
        )
        self.lock = RunLock(settings.run_folder)
        self.restarts = 0
        self._max_restarts = settings.max_restarts if settings.chosen_launcher == "ray" else 0
        self._settings = settings
        self._first_step: int | None = None
        self._first_checkpoint: Path | None = None
        self._start(TrainerState(), None)

    def _start(self, state: TrainerState, checkpoint: Path | None) -> None:
        self.state = state
        self.checkpoint = checkpoint
        self.health = Health(self._settings)
        self._last_saved = state.step
        self._is_in_step = False

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
        if checkpoint is None:
            self._start(TrainerState(kl_coefficient=kl_coefficient), None)
            return
        self._start(self.store.read(checkpoint), checkpoint)
        if self._first_step is None:  # after a loss of workers this command continues what it has checked
            self._require_continuation(checkpoint, total_steps)

    def _require_continuation(self, checkpoint: Path, total_steps: int) -> None:
        """Checks that steps or the last validation are left, and that what decides training is as in the checkpoint."""
        changes = self.store.changes(checkpoint)
        listed = "".join(f"\n  {change}" for change in changes)
        anew = "trainer.experiment_name=<another> or trainer.find_last_checkpoint=false starts a new run"
        if self.state.step >= total_steps and not self._settings.val_only:
            if not changes:
                if self._settings.validates_at_the_end and not self.store.is_validated(checkpoint):
                    return  # the run was stopped before its last validation
                raise RunFinishedError(
                    f"{checkpoint}: all {total_steps} steps of this run are done; raise trainer.max_steps to add steps"
                )
            raise CheckpointError(
                f"all {total_steps} steps of this run are done ({checkpoint}), so these changes would train nothing:{listed}\n"
                f"{anew}; a larger trainer.max_steps with trainer.accept_changes=true continues with them"
            )
        if changes and not self._settings.accept_changes:
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
            written_by_this_run = None
            if not settings.save_model_only:
                written_by_this_run = self.store.find_last(after=self._first_step)
            return written_by_this_run or self._first_checkpoint
        if settings.load_checkpoint_path is not None:
            return Path(settings.load_checkpoint_path).expanduser()
        if settings.find_last_checkpoint:
            return self.store.find_last()
        return None

    def begin(self) -> int | None:
        """Notes that the engines run; returns the step after which the records continue, None for a new run's."""
        is_new = self.checkpoint is None and self._first_step is None
        if self._first_step is None:
            self._first_step = self.state.step
            self._first_checkpoint = self.checkpoint
        return None if is_new else self.state.step

    def restart(self, error: WorkerLostError) -> None:
        """Counts a restart after a loss of workers; raises the error again if no restarts are left."""
        if self.restarts == self._max_restarts:
            raise error
        self.restarts += 1
        where = "continue from the last checkpoint"
        if self._settings.save_model_only:
            where = "start from the beginning (trainer.save_model_only)"
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
        metrics = dict(self.health.metrics)
        if self.restarts:
            metrics["faults/restarts"] = sum_value(self.restarts)
        return metrics

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
            why = f"trainer.save_freq is {settings.save_freq}; with a number of steps a run writes checkpoints while it trains"
            return f"no checkpoint was written yet, so the same command starts from the beginning ({why})"
        finds_it_itself = settings.find_last_checkpoint and settings.load_checkpoint_path is None
        how = "" if finds_it_itself else f" with trainer.load_checkpoint_path={last}"
        return f"the last complete checkpoint is {last}; the same command{how} resumes from it"

    def _postponed(self, what: str) -> AbstractContextManager[None]:
        return interrupts.postponed(what) if self._settings.save_on_interrupt else nullcontext()
