"""Describes, before a run starts, what it will do."""

from __future__ import annotations

import dataclasses

from cepo.algorithms import build_estimator
from cepo.algorithms.settings import SharedSettings
from cepo.config.schema import RunConfig
from cepo.sections import default_tree
from cepo.trees import leaves


def plan_lines(config: RunConfig) -> list[str]:
    data, actor, rollout, trainer = config.data, config.worker.actor, config.worker.rollout, config.trainer
    samples = data.rollout_batch_size * rollout.n
    devices = trainer.num_devices
    updates = data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    per_update = actor.global_batch_size * rollout.n
    size = actor.micro_batch_size_per_device_for_update
    if actor.dynamic_batching:
        passes = f"passes of at most {size * (data.max_prompt_length + data.max_response_length)} tokens"
    else:
        passes = f"{-(-per_update // size)} micro-batches of at most {size}"
    method = config.algorithm.adv_estimator
    views = build_estimator(method, config.methods.get(method)).views
    lora, optim = actor.model.lora, actor.optim
    adapter = "DoRA" if lora.use_dora else "LoRA"
    if lora.quantization is not None:
        adapter = f"Q{adapter} ({lora.quantization})"
    trained = f"{adapter}, rank {lora.rank}, scale {lora.alpha / lora.rank:g}" if lora.rank else "all"
    warm_up = f"{optim.lr_warmup_ratio:g} of the steps warm-up"
    if optim.lr_warmup_steps is not None:
        warm_up = f"{optim.lr_warmup_steps} warm-up steps"
    lines = [
        f"method: {method}, teacher views: {', '.join(views) or 'none'}",
        f"samples per step: {data.rollout_batch_size} prompts x {rollout.n} responses = {samples}"
        + (f", on each of {devices} devices at most {-(-samples // devices)}" if devices > 1 else ""),
        f"optimizer updates per step: {updates}, each over {per_update} samples in {passes}",
        f"tokens per sample: at most {data.max_prompt_length} + {data.max_response_length} = "
        f"{data.max_prompt_length + data.max_response_length}",
        f"trained weights: {trained}{', vision tower frozen' if actor.model.freeze_vision_tower else ''}",
        f"length: {trainer.total_epochs} epochs" if trainer.max_steps is None else f"length: {trainer.max_steps} steps",
        f"learning rate: {optim.lr:g}, {optim.lr_scheduler_type}, {warm_up}",
        f"devices: {_devices_in_words(config)}",
        f"run folder: {trainer.run_folder}",
    ]
    if config.algorithm.needs_critic:
        critic = config.worker.resolved_critic
        assert critic.global_batch_size is not None
        steps = data.rollout_batch_size // critic.global_batch_size * critic.ppo_epochs
        lines.append(
            f"critic: all weights of {critic.model.model_path}, {steps} optimizer updates per step, "
            f"learning rate {critic.optim.lr:g}"
        )
    lines += [f"note: {line}" for line in _settings_not_read(config)]
    if rollout.top_p < 1 or rollout.top_k > 0:
        lines.append(
            "note: top_p or top_k truncates the distribution that is sampled; log-probs are those of the whole distribution"
        )
    return lines


def _settings_not_read(config: RunConfig) -> list[str]:
    """Returns changed settings of `algorithm` that the chosen method does not read."""
    method, defaults = config.algorithm.adv_estimator, dict(leaves(default_tree(SharedSettings)))
    read, given = dict(leaves(config.methods[method])), dataclasses.asdict(config.algorithm)
    return [
        f"algorithm.{key}={value} has no effect: {method} does not read it"
        for key, value in leaves(given)
        if key in defaults and key not in read and value != defaults[key]
    ]


def _devices_in_words(config: RunConfig) -> str:
    trainer, devices = config.trainer, config.trainer.num_devices
    if config.trainer.chosen_launcher == "local":
        return "one, in this process"
    words = f"{devices} ({trainer.nnodes} x {trainer.n_gpus_per_node}), one worker each under Ray"
    if config.worker.actor.global_batch_size < devices:
        idle = devices - config.worker.actor.global_batch_size
        words += f"; an optimizer step has {config.worker.actor.global_batch_size} prompts, so {idle} devices are idle"
    return words
