"""What follows from several settings at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cepo.algorithms import estimator_class
from cepo.config.schema import CriticConfig, LoraConfig, RunConfig, WorkerConfig


def num_devices(config: RunConfig) -> int:
    """Devices of the whole run: without GPUs, worker processes."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def chosen_launcher(config: RunConfig) -> str:
    """`local` or `ray`: what `trainer.launcher=auto` means for this run's devices."""
    trainer = config.trainer
    if trainer.launcher != "auto":
        return trainer.launcher
    return "ray" if num_devices(config) > 1 else "local"


def run_folder(config: RunConfig) -> Path:
    """Where checkpoints and records go: `trainer.save_checkpoint_path`, else checkpoints/<project>/<experiment>."""
    trainer = config.trainer
    if trainer.save_checkpoint_path is not None:
        return Path(trainer.save_checkpoint_path)
    return Path("checkpoints") / trainer.project_name / trainer.experiment_name


def served_adapter_rank(lora: LoraConfig) -> int:
    """Rank of the adapter that the rollout engine gets beside the base; 0 where it gets all weights, whatever is trained.

    vLLM serves no adapter of DoRA, and the base that it reads from the checkpoint is not the one in 4 bits.
    """
    return 0 if lora.use_dora or lora.quantization is not None else lora.rank


def needs_critic(config: RunConfig) -> bool:
    """Whether the method learns from a critic."""
    return estimator_class(config.algorithm.adv_estimator).needs_values


def resolved_critic(worker: WorkerConfig) -> CriticConfig:
    """`worker.critic` with what it takes over from the actor: batch size and model path, where they are null.

    With the path come the actor's `override_config`, the critic's own entries winning, and its `trust_remote_code`.
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
