"""Derives values from several settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cepo.algorithms import estimator_class
from cepo.config.schema import CriticConfig, LoraConfig, RunConfig, WorkerConfig


def num_devices(config: RunConfig) -> int:
    """Returns the number of devices of the whole run; without GPUs, the number of worker processes."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def most_responses_at_once(config: RunConfig) -> int:
    """Returns the number of responses that one vLLM engine samples at once, `worker.rollout.max_num_seqs`.

    By default these are an engine's responses of a step. vLLM captures CUDA graphs up to this number, which takes time
    and memory. There is room for at least 128, because validation has other batches, and for at most 1,024.
    """
    rollout = config.worker.rollout
    if rollout.max_num_seqs is not None:
        return rollout.max_num_seqs
    engines = max(1, num_devices(config) // rollout.tensor_parallel_size)
    wanted = -(-config.data.rollout_batch_size // engines) * rollout.n
    return min(max(wanted, 128), 1024, rollout.max_num_batched_tokens)


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


def served_adapter_rank(lora: LoraConfig, *, merged: bool) -> int:
    """Returns the rank of the adapter that the rollout engine serves on the base; 0 if it loads all weights instead.

    It loads them if the adapter is `merged` by request, is a DoRA adapter, which vLLM cannot serve, or was trained on a
    4-bit base, which is not the one that vLLM reads from the checkpoint.
    """
    return 0 if merged or lora.use_dora or lora.quantization is not None else lora.rank


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
