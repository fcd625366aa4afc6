"""Checks a run before it loads libraries and models, so that mistakes are reported within seconds."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from cepo.config.checks import require_weights
from cepo.config.data_schema import DataConfig
from cepo.config.schema import ActorConfig, AlgorithmConfig, WorkerConfig
from cepo.config.trainer_schema import TrainerConfig
from cepo.data.hub import require_hub_names
from cepo.errors import ConfigError, DataError, RewardError
from cepo.hardware import device_in_words, limit_threads, require_devices, require_usable_torch
from cepo.runtime.reach import why_no_answer
from cepo.tracking.run_folder import read_environment
from cepo.trees import leaves

if TYPE_CHECKING:
    from cepo.data.dataset import ProblemSet
    from cepo.data.mixing import MixedProblems
    from cepo.rewards.pool import RewardPool

logger = logging.getLogger("cepo.train")


def check_before_imports(worker: WorkerConfig, trainer: TrainerConfig) -> None:
    """Checks everything that needs neither torch nor an engine.

    Raises:
        RewardError: there is no such reward file.
        ConfigError: the model has no weights, or no Ray cluster answers at the address.
    """
    from cepo.rewards.functions import resolve_reward_path

    require_weights(worker.actor.model.model_path)
    reward = worker.reward
    for spec in [*reward.reward_functions, *filter(None, [reward.answer_function])]:
        resolve_reward_path(spec)
    address = ray_address(trainer)
    if trainer.chosen_launcher == "ray" and address is not None:
        why = why_no_answer(address)
        if why is not None:
            raise ConfigError(
                f"no Ray cluster answers at '{address}' ({why}). Start one with `ray start --head`, and give the address it "
                "prints as trainer.ray_address or RAY_ADDRESS; without either, a cluster is started on this machine"
            )


def limited_threads(trainer: TrainerConfig) -> str | None:
    """Limits the threads of a run in this process, before torch is loaded; returns what was chosen, if anything.

    Under Ray each worker gets its share of the processors.
    """
    if trainer.chosen_launcher != "local":
        return None
    try:
        starts = read_environment(trainer.run_folder) if trainer.find_last_checkpoint else []
    except DataError:  # the tracker reports damaged records, and renames them
        starts = []
    recorded = dict(leaves(starts[-1])).get("threads.torch") if starts else None
    return limit_threads(recorded if isinstance(recorded, int) else None)


def check_hub_names(data: DataConfig, algorithm: AlgorithmConfig, worker: WorkerConfig) -> None:
    """Checks that models and data sets with hub names are available.

    Raises:
        ConfigError: a name is available neither from the hub nor from the cache.
    """
    actor, critic = worker.actor.model, worker.critic.model
    models = [
        ("worker.actor.model.model_path", actor.model_path),
        ("worker.actor.model.tokenizer_path", actor.tokenizer_path),
        ("worker.critic.model.model_path", critic.model_path if algorithm.needs_critic else None),
    ]
    sources = [("data.train_files", source) for source in data.train_sources]
    require_hub_names(models, [*sources, ("data.val_files", data.val_files)])


def check_devices(trainer: TrainerConfig) -> str:
    """Checks that the run's devices are available and describes where training runs. Imports torch.

    In a Ray cluster of several machines each worker checks its own device.

    Raises:
        ConfigError: torch cannot be used, or this machine has fewer devices than the run needs.
    """
    address = ray_address(trainer)
    if trainer.chosen_launcher == "ray" and (address is not None or trainer.nnodes > 1):
        return "device: those of the Ray cluster" + ("" if address is None else f" at {address}")
    require_usable_torch()
    require_devices(trainer.n_gpus_per_node)
    return f"device: {device_in_words()}"


def ray_address(trainer: TrainerConfig) -> str | None:
    """Returns the address of the Ray cluster that a run joins; None if it starts one on this machine."""
    return trainer.ray_address or os.environ.get("RAY_ADDRESS") or None


def check_before_loading(actor: ActorConfig, rewards: RewardPool, problems: ProblemSet | MixedProblems) -> None:
    """Checks that the adapter's settings name layers of the model, and that the reward function returns a score.

    It gets the first problem's own answer as the response. If it raises, this only logs a warning, because it may raise
    on purpose for such a response.

    Raises:
        RewardError, ConfigError: one of these checks fails.
    """
    from cepo.trainer.asking import reward_input

    problem = problems[0]
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
