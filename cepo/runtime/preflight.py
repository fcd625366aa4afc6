"""Checks a run before it loads libraries and models, so that mistakes are reported within seconds."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config import RunConfig, check_config
from cepo.config.path_checks import require_weights
from cepo.config.schema import TrainerConfig
from cepo.config.worker_schema import ActorConfig
from cepo.data.hub import require_hub_names
from cepo.errors import ConfigError, RewardError
from cepo.files.trees import leaves
from cepo.hardware import device_in_words, num_processors, require_devices, require_usable_torch
from cepo.run_folder.environment import read_environment
from cepo.run_folder.sinks.tracker import check_sinks
from cepo.runtime.network import why_no_answer
from cepo.sections.messages import written
from cepo.terminal import interrupts
from cepo.terminal.progress import phase

if TYPE_CHECKING:
    from cepo.algorithms import Estimator
    from cepo.data.training_set import TrainingProblems
    from cepo.models.processing import Processing
    from cepo.rewards.pool import RewardPool

logger = logging.getLogger("cepo.train")
_VARIABLES_OF_OTHERS = {
    "MAX_PIXELS": "data.max_pixels",
    "MIN_PIXELS": "data.min_pixels",
    "FPS": "data.video_fps",
    "NPROC_PER_NODE": "trainer.n_gpus_per_node",
    "NNODES": "trainer.nnodes",
    "WANDB_PROJECT": "trainer.project_name",
}
"""What ms-swift, torchrun and W&B read from the environment, with the setting that holds it here."""
_PLAN_COLUMNS = 80
_THREADS = "OMP_NUM_THREADS"
_ENDS_IN_ANSWER = re.compile(r"\S\s*####\s*\S")


_LAUNCHERS = {
    "WORLD_SIZE": ("RANK", "torchrun, accelerate or deepspeed"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "srun"),
}
"""The variables with the number of processes that a launcher has started: with that of a process's own number, and its name."""


def require_one_process(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ConfigError` if a launcher has started several processes, which would all train in the same run folder."""
    for variable, (own_number, launcher) in _LAUNCHERS.items():
        num_processes = environment.get(variable, "1")
        if num_processes != "1" and own_number in environment:
            raise ConfigError(
                f"{launcher} has started this as process {environment[own_number]} of {num_processes} ({variable}), and each "
                "of them would train a model of its own in the same run folder. cepo starts one worker per device itself: run "
                "`cepo train config=FILE trainer.n_gpus_per_node=N` without the launcher (several machines: docs/gpus.md)"
            )


def check_run(config: RunConfig) -> None:
    """Checks settings, files, cluster, devices and hub names, the cheapest first, limits the threads and logs the plan."""
    lines = check_config(config)
    require_weights(config.worker.actor.model.model_path)
    check_sinks(config.trainer.logger)
    require_writable(config.trainer.run_folder)
    threads = limited_threads(config.trainer)
    lines += [*unread_variables(config), *([] if threads is None else [threads])]
    logger.info("plan\n%s", "\n".join(plan_table(lines)))
    with interrupts.loading(), phase("checking devices"):
        devices = check_devices(config.trainer)
    logger.info("device: %s", devices)
    require_hub_names(config.named_models, config.named_data)


def plan_table(lines: Sequence[str]) -> list[str]:
    """Returns the facts `subject: value` of a plan as the lines of a table, values below one another and wrapped."""
    facts: list[tuple[str, str]] = []
    for line in lines:
        subject, _, value = line.partition(": ")
        facts.append((subject, value))
    width = max(len(subject) for subject, _ in facts)
    table: list[str] = []
    for subject, value in facts:
        beginning = f"  {subject:<{width}}  "
        indent = " " * len(beginning)
        table += textwrap.wrap(
            value, _PLAN_COLUMNS, initial_indent=beginning, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return table


def require_writable(folder: Path) -> None:
    """Raises `ConfigError` if the run folder cannot be made or written; makes nothing."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    reason = None
    if not existing.is_dir():
        reason = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"{existing} cannot be written by this user"
    if reason is not None:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {reason}. Choose another one with trainer.save_checkpoint_path"
        )


def ray_address(trainer: TrainerConfig) -> str | None:
    """Returns the address of the Ray cluster that a run joins; None if it starts one on this machine."""
    return trainer.ray_address or os.environ.get("RAY_ADDRESS") or None


def unread_variables(config: RunConfig) -> list[str]:
    """Returns the variables of the environment that other programs read and this one does not, if they differ from a setting."""
    lines: list[str] = []
    for variable, key in _VARIABLES_OF_OTHERS.items():
        section, _, name = key.partition(".")
        setting = getattr(getattr(config, section), name)
        value = os.environ.get(variable)
        if value is not None and value != str(setting):
            lines.append(f"note: {variable}={value} is not read here; the setting {key} is {written(setting)}")
    return lines


def limited_threads(trainer: TrainerConfig) -> str | None:
    """Sets OMP_NUM_THREADS if a run in this process may not use all processors of the machine, and says so.

    A resumed run keeps the number with which it began, because another one changes the rounding of sums. Does nothing if
    the user has set a limit, torch, which reads it once, is loaded, or the run is under Ray, which limits each worker.
    """
    if trainer.chosen_launcher != "local" or _THREADS in os.environ or "torch" in sys.modules:
        return None
    recorded: object = None
    starts = read_environment(trainer.run_folder) if trainer.find_last_checkpoint else []
    if starts:
        recorded = dict(leaves(starts[-1])).get("threads.torch")
    num_usable = num_processors()
    num_present = os.cpu_count() or 1
    num_threads = min(num_usable, recorded) if isinstance(recorded, int) else num_usable
    if num_threads == num_present:
        return None
    os.environ[_THREADS] = str(num_threads)
    why = f"as this process may use {num_usable} of {num_present} processors"
    if recorded:
        why = "as many as when the run began"
    return f"threads: {num_threads}, {why}; set {_THREADS} to choose another number"


def check_devices(trainer: TrainerConfig) -> str:
    """Checks the cluster or this machine's devices and describes them; in a Ray cluster each worker checks its own."""
    address = ray_address(trainer)
    if trainer.chosen_launcher == "ray" and address is not None:
        why = why_no_answer(address)
        if why is not None:
            raise ConfigError(
                f"no Ray cluster answers at '{address}' ({why}). Start one with `ray start --head`, and give the address it "
                "prints as trainer.ray_address or RAY_ADDRESS; without either, a cluster is started on this machine"
            )
        return f"those of the Ray cluster at {address}"
    if trainer.chosen_launcher == "ray" and trainer.nnodes > 1:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            raise ConfigError(
                f"trainer.nnodes={trainer.nnodes} needs a Ray cluster of {trainer.nnodes} machines, and none is named. Run "
                "`ray start --head` on this machine and the command that it prints on the others, then add "
                "trainer.ray_address=auto: docs/gpus.md"
            )
        return "those of the Ray cluster"
    require_usable_torch()
    require_devices(trainer.n_gpus_per_node)
    return device_in_words()


def check_before_loading(
    actor: ActorConfig, estimator: Estimator, rewards: RewardPool, problems: TrainingProblems, processing: Processing
) -> None:
    """Checks that the adapter's settings name layers, that a teacher's model reads the policy's tokens, and the reward.

    The reward function must give the first problem's answer a score. If it raises, this only logs a warning, because it
    may raise on purpose for such a response.
    """
    from cepo.trainer.sampling import reward_input
    from cepo.workers.teacher_model import require_fitting_teacher

    require_fitting_teacher(estimator, actor.model, processing)
    if processing.prefilled:
        logger.info(
            "the chat template begins each response with %r; reward functions read it as the beginning of the response",
            processing.prefilled,
        )
    problem = problems[0]
    if _ENDS_IN_ANSWER.search(problem.ground_truth):
        logger.warning(
            "the first answer ends in %r, as those of GSM8K do, and a reward compares a response with the whole text: write "
            "only what follows #### into the column data.answer_key",
            problem.ground_truth[-40:],
        )
    failure = rewards.trial(reward_input(problem, problem.ground_truth, 1, rewards.needs_images))
    if failure is not None and failure.breaks_contract:
        raise RewardError(f"worker.reward.reward_function={rewards.spec}: {failure.details}")
    if failure is not None:
        logger.warning(
            "the reward function fails for a first problem's own answer: %s. If it fails for every response of the first step, "
            "the run ends there",
            failure.reason,
        )
    if actor.model.lora.rank:
        from cepo.workers.adapters import check_adapter_targets  # loads PEFT

        check_adapter_targets(actor)
