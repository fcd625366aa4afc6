"""Derives values from several settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cepo.algorithms import estimator_class
from cepo.config.schema import CriticConfig, LoraConfig, RunConfig, WorkerConfig


def num_devices(config: RunConfig) -> int:
    """Returns the number of devices of the whole run; without GPUs, the number of worker processes."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def chosen_launcher(config: RunConfig) -> str:
    """Returns `local` or `ray`, with `trainer.launcher=auto` resolved for this run's devices."""
    trainer = config.trainer
    if trainer.launcher != "auto":
        return trainer.launcher
    return "ray" if num_devices(config) > 1 else "local"


def run_folder(config: RunConfig) -> Path:
    """Returns the run folder: `trainer.save_checkpoint_path`, else checkpoints/<project>/<experiment>."""
    trainer = config.trainer
    if trainer.save_checkpoint_path is not None:
        return Path(trainer.save_checkpoint_path)
    return Path("checkpoints") / trainer.project_name / trainer.experiment_name


def served_adapter_rank(lora: LoraConfig) -> int:
    """Returns the rank of the adapter that the rollout engine serves on the base; 0 if it loads all weights instead.

    vLLM cannot serve a DoRA adapter, and the base that it reads from the checkpoint is not the 4-bit one.
    """
    return 0 if lora.use_dora or lora.quantization is not None else lora.rank


def needs_critic(config: RunConfig) -> bool:
    """Returns whether the method uses a critic."""
    return estimator_class(config.algorithm.adv_estimator).needs_values


def resolved_critic(worker: WorkerConfig) -> CriticConfig:
    """Returns `worker.critic`, with batch size and model path taken from the actor if they are null.

    The actor's model path brings its `override_config`, which the critic's entries override, and `trust_remote_code`.
    """
    critic, model = worker.critic, worker.critic.model
    if model.model_path is None:
        model = dataclasses.replace(
            model,
            model_path=worker.actor.model.model_path,
            override_config={**worker.actor.model.override_config, **model.override_config},
            trust_remote_code=worker.actor.model.trust_remote_code or model.trust_remote_code,
        )
    return dataclasses.replace(
        critic, model=model, global_batch_size=critic.global_batch_size or worker.actor.global_batch_size
    )
