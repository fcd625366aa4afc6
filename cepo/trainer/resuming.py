"""Decides from which checkpoint a run continues, and keeps the history of one command over restarts of its workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cepo.config import RunConfig, run_folder
from cepo.errors import CheckpointError
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.run_lock import RunLock


@dataclasses.dataclass
class RunHistory:
    """The progress of one command over the restarts of its workers.

    Attributes:
        restarts: how often workers were lost and started again.
        first_step: the step that the command began with; None until its records are open.
        first_checkpoint: the checkpoint that it began from.
        trainer_state: of the trainer that ran last, None before the first one.
        lock: of the run folder, held by the command; None: each trainer takes its own.
    """

    restarts: int = 0
    first_step: int | None = None
    first_checkpoint: Path | None = None
    trainer_state: TrainerState | None = None
    lock: RunLock | None = None

    def step_to_resume(self, state: TrainerState, checkpoint: Path | None) -> int | None:
        """Returns the step after which records continue; None for a new start, which sets older ones aside."""
        return None if checkpoint is None and self.first_step is None else state.step

    def begun(self, state: TrainerState, checkpoint: Path | None) -> None:
        """Notes that a trainer's records are open and that it continues from `state`."""
        self.trainer_state = state
        if self.first_step is None:
            self.first_step, self.first_checkpoint = state.step, checkpoint


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Returns the store of the run folder's checkpoints."""
    trainer = config.trainer
    return CheckpointStore(
        run_folder(config),
        keep=trainer.save_limit,
        identity=_identity(config),
        weights_only=trainer.save_model_only,
    )


def checkpoint_to_load(config: RunConfig, store: CheckpointStore, history: RunHistory | None = None) -> Path | None:
    """Returns the checkpoint to start from: the one the run names, else its folder's last; None for a start at step 1.

    After a restart of its workers a run continues from its own last checkpoint. If its checkpoints hold only weights,
    it starts again where the command began.
    """
    if history is not None and history.first_step is not None:
        if config.trainer.save_model_only:
            return history.first_checkpoint
        return store.find_last(after=history.first_step) or history.first_checkpoint
    if config.trainer.load_checkpoint_path is not None:
        folder = Path(config.trainer.load_checkpoint_path)
        if not folder.is_dir():
            raise CheckpointError(
                f"trainer.load_checkpoint_path '{folder}' does not exist; give a folder global_step_<N>"
            )
        return folder
    return store.find_last() if config.trainer.find_last_checkpoint else None


def _identity(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a checkpoint and the run resuming it must share for the result to be the same run."""
    model, lora = config.worker.actor.model, config.worker.actor.model.lora
    return {
        "adv_estimator": config.algorithm.adv_estimator,
        "model_path": model.model_path,
        "lora_rank": lora.rank,
        "quantization": lora.quantization,
        "double_quantization": None if lora.quantization is None else lora.double_quantization,
    }


def how_to_resume(config: RunConfig) -> str:
    trainer = config.trainer
    if trainer.save_model_only:
        anew = "the same command with trainer.find_last_checkpoint=false starts anew"
        return f"checkpoints hold only weights (trainer.save_model_only), so no run continues from them; {anew}"
    last = CheckpointStore(run_folder(config), keep=-1, identity={}).find_last()
    if last is None:
        often = f"trainer.save_freq is {trainer.save_freq}; a number of steps makes a run write checkpoints on its way"
        return f"no checkpoint was written yet, so the same command starts anew ({often})"
    if trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the last whole checkpoint is {last}; the same command resumes from it"
    return f"the last whole checkpoint is {last}; the same command with trainer.load_checkpoint_path={last} resumes from it"
