"""Selects the checkpoint from which a run continues, and tracks one command's progress over restarts of its workers."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from cepo.config import RunConfig, record_tree, run_folder
from cepo.config.private import digest
from cepo.errors import CepoError, CheckpointError
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.run_lock import RunLock
from cepo.trees import is_mapping, leaves

logger = logging.getLogger(__name__)


_TRAINED = (
    "data.",
    "algorithm.",
    "worker.actor.",
    "worker.critic.",
    *(f"worker.rollout.{name}" for name in ("n", "temperature", "top_p", "top_k", "ignore_eos", "seed")),
    *(
        f"worker.reward.{name}"
        for name in ("reward_function", "reward_weights", "answer_function", "skip_special_tokens")
    ),
    *(f"trainer.{name}" for name in ("seed", "critic_warmup", "plugins", "max_try_make_batch")),
)
"""Prefixes of the settings that decide what is trained, unless a suffix is in `_FREE` (speed, memory, validation)."""
_KEYWORDS = "worker.reward.reward_function_kwargs"
_FREE = (
    "data.val_files",
    "data.val_batch_size",
    "worker.rollout.name",
    ".micro_batch_size_per_device_for_update",
    ".micro_batch_size_per_device_for_experience",
    ".padding_free",
    ".dynamic_batching",
    ".enable_gradient_checkpointing",
    ".enable_full_shard",
    ".enable_cpu_offload",
    ".enable_rank0_init",
    ".fsdp_size",
    ".offload_params",
    ".offload_optimizer",
)
_WEIGHTS_ALONE = (
    "To train its weights in another form, leave out trainer.load_checkpoint_path and give the output of `cepo merge` as "
    "worker.actor.model.model_path"
)


class RunFinishedError(CepoError):
    """The run to resume has no steps left. The command ends without an error."""


@dataclasses.dataclass
class RunHistory:
    """The progress of one command over the restarts of its workers.

    Attributes:
        restarts: number of times that workers were lost and restarted.
        first_step: the step from which the command started; None until its records are open.
        first_checkpoint: the checkpoint from which the command started, if any.
        trainer_state: state of the last trainer; None before the first one.
        lock: lock of the run folder, held by the command; with None each trainer acquires its own.
    """

    restarts: int = 0
    first_step: int | None = None
    first_checkpoint: Path | None = None
    trainer_state: TrainerState | None = None
    lock: RunLock | None = None

    def step_to_resume(self, state: TrainerState, checkpoint: Path | None) -> int | None:
        """Returns the step after which records continue; None for a new run, which moves older records aside."""
        return None if checkpoint is None and self.first_step is None else state.step

    def begun(self, state: TrainerState, checkpoint: Path | None) -> None:
        """Notes that a trainer has opened its records and continues from `state`."""
        self.trainer_state = state
        if self.first_step is None:
            self.first_step, self.first_checkpoint = state.step, checkpoint


def checkpoint_store(config: RunConfig, *, data: str = "") -> CheckpointStore:
    """Returns the store of the run folder's checkpoints; `data` describes the training set's content."""
    trainer = config.trainer
    return CheckpointStore(
        run_folder(config),
        keep=trainer.save_limit,
        identity=_identity(config),
        settings=trained_settings(config) | {"data": data},
        weights_only=trainer.save_model_only,
        **({} if trainer.load_checkpoint_path is None else {"new_run": _WEIGHTS_ALONE}),
    )


def trained_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the recorded settings that decide what is trained, by dotted key, without empty mappings.

    Of the reward function's keywords, which may be confidential, a digest is kept.
    """
    found = {
        key: value
        for key, value in leaves(record_tree(config))
        if key.startswith(_TRAINED) and not key.endswith(_FREE) and not is_mapping(value)
    }
    keywords = {key: found.pop(key) for key in list(found) if key.startswith(_KEYWORDS)}
    return found | {f"{_KEYWORDS} (digest)": digest(keywords)}


def check_continuation(
    config: RunConfig, store: CheckpointStore, checkpoint: Path, step: int, total_steps: int
) -> None:
    """Checks, before an engine starts, that the run has steps left and continues with the settings of `checkpoint`.

    Raises:
        RunFinishedError: all steps are done.
        CheckpointError: decisive settings have changed, but `trainer.accept_changes` is off or no steps are left.
    """
    changes = store.changes(checkpoint)
    listed = "".join(f"\n  {change}" for change in changes)
    anew = "trainer.experiment_name=<another> or trainer.find_last_checkpoint=false starts a new run"
    trainer = config.trainer
    validates = config.data.val_files is not None and (trainer.val_freq > 0 or trainer.val_before_train)
    if step == total_steps and validates and not store.is_validated(checkpoint):
        logger.info("%s: all %d steps are done, and only the last validation is missing", checkpoint, step)
    elif step >= total_steps and not trainer.val_only:
        if not changes:
            raise RunFinishedError(
                f"{checkpoint}: all {total_steps} steps of this run are done; raise trainer.max_steps to add steps"
            )
        raise CheckpointError(
            f"all {total_steps} steps of this run are done ({checkpoint}), so these changes would train nothing:{listed}\n"
            f"{anew}; a larger trainer.max_steps with trainer.accept_changes=true continues with them"
        )
    if changes and not trainer.accept_changes:
        raise CheckpointError(
            f"settings that decide what is trained have changed since {checkpoint}:{listed}\n"
            f"trainer.accept_changes=true continues with them; {anew}"
        )
    if changes:
        logger.warning("continuing from %s with changed settings (trainer.accept_changes):%s", checkpoint, listed)


def checkpoint_to_load(config: RunConfig, store: CheckpointStore, history: RunHistory | None = None) -> Path | None:
    """Returns the checkpoint to start from: the configured one, else the run folder's last; None for a start at step 1.

    After a restart of its workers a run continues from the last checkpoint that it wrote itself. If its checkpoints
    hold only weights, it starts again from where the command started.
    """
    if history is not None and history.first_step is not None:
        if config.trainer.save_model_only:
            return history.first_checkpoint
        return store.find_last(after=history.first_step) or history.first_checkpoint
    if config.trainer.load_checkpoint_path is not None:
        return Path(config.trainer.load_checkpoint_path).expanduser()
    return store.find_last() if config.trainer.find_last_checkpoint else None


def _identity(config: RunConfig) -> dict[str, Any]:
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
        anew = "the same command with trainer.find_last_checkpoint=false starts a new run"
        return f"checkpoints hold only weights (trainer.save_model_only), so no run can continue from them; {anew}"
    last = CheckpointStore(run_folder(config), keep=-1, identity={}).find_last()
    if last is None:
        often = (
            f"trainer.save_freq is {trainer.save_freq}; with a number of steps a run writes checkpoints while it trains"
        )
        return f"no checkpoint was written yet, so the same command starts from the beginning ({often})"
    if trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the last complete checkpoint is {last}; the same command resumes from it"
    return f"the last complete checkpoint is {last}; the same command with trainer.load_checkpoint_path={last} resumes from it"
