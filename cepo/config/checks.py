"""Faults between settings, found before anything heavy starts, and the plan that follows from them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cepo.algorithms import build_estimator, estimator_class
from cepo.config.loader import build_run, plain_tree
from cepo.config.paths import find_path, searched, split_function
from cepo.config.schema import CriticConfig, RunConfig, WorkerConfig
from cepo.config.sources import Origins
from cepo.errors import ConfigError, did_you_mean

MICROGEO_MODEL = "microgeo:model"
MICROGEO_DATA = ("microgeo:train", "microgeo:validation")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".arrow")


def check_config(config: RunConfig) -> list[str]:
    """Check a run as a whole and return its plan, one line per fact, for the log.

    Raises:
        ConfigError: a value or a method's section is not acceptable, two settings are in conflict, or a file is missing.
    """
    build_run(plain_tree(config), Origins())
    _check_batches(config)
    _check_lengths(config)
    _check_method(config)
    _check_algorithm(config)
    _check_model(config)
    _check_validation(config)
    _check_devices(config)
    _check_files(config)
    return plan_lines(config)


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


def _needs_critic(config: RunConfig) -> bool:
    return estimator_class(config.algorithm.adv_estimator).needs_values


def _check_batches(config: RunConfig) -> None:
    rollout = config.data.rollout_batch_size
    sizes = {"actor": config.worker.actor.global_batch_size}
    if _needs_critic(config):
        sizes["critic"] = config.worker.critic.global_batch_size or sizes["actor"]
    for worker, update in sizes.items():
        if rollout % update:
            divisors = [str(size) for size in range(1, rollout + 1) if rollout % size == 0]
            raise ConfigError(
                f"data.rollout_batch_size={rollout} prompts cannot be split into optimizer steps of "
                f"worker.{worker}.global_batch_size={update} prompts. Set global_batch_size to a divisor of {rollout}: "
                f"{', '.join(divisors)}."
            )


def _check_lengths(config: RunConfig) -> None:
    data, rollout = config.data, config.worker.rollout
    needed = data.max_prompt_length + data.max_response_length
    parts = f"data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + {data.max_response_length}"
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        raise ConfigError(
            f"worker.rollout.max_model_len={rollout.max_model_len} is below {parts} = {needed}. "
            f"Set it to at least {needed}, or to null."
        )
    longest = rollout.max_model_len or needed
    if rollout.max_num_batched_tokens < longest:
        raise ConfigError(
            f"worker.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below the context length "
            f"{longest} ({'worker.rollout.max_model_len' if rollout.max_model_len else parts}). Set it to at least {longest}."
        )
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        raise ConfigError(f"data.min_pixels={data.min_pixels} is above data.max_pixels={data.max_pixels}.")


def _check_method(config: RunConfig) -> None:
    name = config.algorithm.adv_estimator
    estimator = build_estimator(name, config.algorithm.methods[name])
    if estimator.needs_group and config.worker.rollout.n == 1:
        raise ConfigError(
            f"worker.rollout.n=1 with algorithm.adv_estimator={name}: this method compares the responses to one prompt "
            "with one another. Set worker.rollout.n to at least 2."
        )


def _check_algorithm(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        raise ConfigError(
            f"algorithm.filter_low={algorithm.filter_low} is not below algorithm.filter_high={algorithm.filter_high}: "
            "online filtering would keep nothing"
        )
    if algorithm.kl_type == "adaptive" and algorithm.use_kl_loss and not algorithm.disable_kl:
        raise ConfigError(
            "algorithm.kl_type=adaptive follows a KL in the reward; set algorithm.use_kl_loss=false, or kl_type=fixed"
        )


def _check_model(config: RunConfig) -> None:
    lora = config.worker.actor.model.lora
    key = "worker.actor.model.lora"
    if lora.exclude_modules is not None:
        try:
            re.compile(lora.exclude_modules)
        except re.error as error:
            raise ConfigError(
                f"{key}.exclude_modules={lora.exclude_modules!r} is no regular expression: {error}."
            ) from error
    if not all(part.strip() for part in lora.target_modules.split(",")):
        raise ConfigError(
            f"{key}.target_modules={lora.target_modules!r} must be all-linear or module names separated by commas."
        )


def _check_validation(config: RunConfig) -> None:
    trainer = config.trainer
    if config.data.val_files is not None:
        return
    wanted = [
        f"trainer.{key}={str(value).lower()}"
        for key, value, asks in (
            ("val_only", trainer.val_only, trainer.val_only),
            ("val_before_train", trainer.val_before_train, trainer.val_before_train),
            ("val_freq", trainer.val_freq, trainer.val_freq > 0),
        )
        if asks
    ]
    if wanted:
        raise ConfigError(
            f"data.val_files is null, but {' and '.join(wanted)} asks for validation. Set data.val_files, or "
            "trainer.val_before_train=false trainer.val_freq=-1 trainer.val_only=false."
        )


def _check_devices(config: RunConfig) -> None:
    trainer = config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    if devices > 1:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node} are {devices} devices: "
            "the local runtime of this release drives one. Set both to 1."
        )


def _check_files(config: RunConfig) -> None:
    data, model, trainer = config.data, config.worker.actor.model, config.trainer
    _require_data("data.train_files", data.train_files)
    if data.val_files is not None:
        _require_data("data.val_files", data.val_files)
    _require_model("worker.actor.model.model_path", model.model_path)
    if model.tokenizer_path is not None:
        _require_model("worker.actor.model.tokenizer_path", model.tokenizer_path)
    if _needs_critic(config) and config.worker.critic.model.model_path is not None:
        _require_model("worker.critic.model.model_path", config.worker.critic.model.model_path)
    _require_file("data.format_prompt", data.format_prompt)
    _require_file("data.override_chat_template", data.override_chat_template)
    reward_key = "worker.reward.reward_function"
    reward_file, function = split_function(config.worker.reward.reward_function)
    if not reward_file.endswith(".py") or not function.isidentifier():
        raise ConfigError(
            f"{reward_key}={config.worker.reward.reward_function} must have the form path/file.py:function."
        )
    _require_file(reward_key, reward_file)
    for path in trainer.plugins:
        _require_file("trainer.plugins", path)
    _require_folder("data.image_dir", data.image_dir)
    _require_folder("trainer.load_checkpoint_path", trainer.load_checkpoint_path)
    template = config.algorithm.methods[config.algorithm.adv_estimator].get("teacher", {}).get("template")
    _require_file(f"algorithm.{config.algorithm.adv_estimator}.teacher.template", template)


def _require_file(key: str, path: str | None) -> None:
    if path is None:
        return
    found = find_path(path)
    if found is None or not found.is_file():
        raise ConfigError(f"{key}={path}: there is no such file ({searched(path)}).")


def _require_folder(key: str, path: str | None) -> None:
    if path is not None and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{key}={path}: there is no such folder.")


def _require_data(key: str, name: str) -> None:
    """A data set is an embedded one, an existing file or folder, or has the form of a hub name; each with `@split` or not."""
    if name.startswith("microgeo:"):
        if name not in MICROGEO_DATA:
            raise ConfigError(
                f"{key}={name}: unknown part of the embedded world.{did_you_mean(name, MICROGEO_DATA)} "
                f"Known: {', '.join(MICROGEO_DATA)}."
            )
        return
    if find_path(name) is not None:
        return
    path, separator, split = name.partition("@")
    if "@" in split or (separator and not split) or not path:
        raise ConfigError(f"{key}={name!r} must have the form name@split with one '@', or be a path.")
    if find_path(path) is None and (path.endswith(_DATA_ENDINGS) or not _HUB_NAME.fullmatch(path)):
        raise ConfigError(
            f"{key}={name}: there is no such file or folder ({searched(path)}), and it has not the form of a hub name "
            "org/name@split."
        )


def _require_model(key: str, name: str) -> None:
    """A model is the embedded one, an existing folder, or has the form of a hub name."""
    if name.startswith("microgeo:"):
        if name != MICROGEO_MODEL:
            raise ConfigError(f"{key}={name}: unknown part of the embedded world. Known: {MICROGEO_MODEL}.")
        return
    found = find_path(name)
    if found is not None and not found.is_dir():
        raise ConfigError(f"{key}={name} is a file; a model is a folder with config.json and weights.")
    if found is None and not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{key}={name}: there is no such folder ({searched(name)}), and it has not the form of a hub name org/name."
        )


def plan_lines(config: RunConfig) -> list[str]:
    """What the run will do, derived from its settings."""
    data, actor, rollout, trainer = config.data, config.worker.actor, config.worker.rollout, config.trainer
    samples = data.rollout_batch_size * rollout.n
    updates = data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    per_update = actor.global_batch_size * rollout.n
    size = actor.micro_batch_size_per_device_for_update
    if actor.dynamic_batching:
        passes = f"passes of at most {size * (data.max_prompt_length + data.max_response_length)} tokens"
    else:
        passes = f"{-(-per_update // size)} micro-batches of at most {size}"
    views = estimator_class(config.algorithm.adv_estimator).views
    lora = actor.model.lora
    lines = [
        f"method: {config.algorithm.adv_estimator}, teacher views: {', '.join(views) or 'none'}",
        f"samples per step: {data.rollout_batch_size} prompts x {rollout.n} responses = {samples}",
        f"optimizer updates per step: {updates}, each over {per_update} samples in {passes}",
        f"tokens per sample: at most {data.max_prompt_length} + {data.max_response_length} = "
        f"{data.max_prompt_length + data.max_response_length}",
        f"trained weights: {f'LoRA, rank {lora.rank}, scale {lora.alpha / lora.rank:g}' if lora.rank else 'all'}"
        f"{', vision tower frozen' if actor.model.freeze_vision_tower else ''}",
        f"length: {trainer.total_epochs} epochs" if trainer.max_steps is None else f"length: {trainer.max_steps} steps",
        f"learning rate: {actor.optim.lr:g}, {actor.optim.lr_scheduler_type}, "
        + (
            f"{actor.optim.lr_warmup_ratio:g} of the steps warm-up"
            if actor.optim.lr_warmup_steps is None
            else f"{actor.optim.lr_warmup_steps} warm-up steps"
        ),
        f"run folder: {run_folder(config)}",
    ]
    if _needs_critic(config):
        critic = resolved_critic(config.worker)
        assert critic.global_batch_size is not None
        steps = data.rollout_batch_size // critic.global_batch_size * critic.ppo_epochs
        lines.append(
            f"critic: all weights of {critic.model.model_path}, {steps} optimizer updates per step, "
            f"learning rate {critic.optim.lr:g}"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        lines.append("note: top_p or top_k truncates the sampled distribution; log-probs are of the whole one")
    return lines


def run_folder(config: RunConfig) -> Path:
    """Where checkpoints and records go: `trainer.save_checkpoint_path`, else checkpoints/<project>/<experiment>."""
    trainer = config.trainer
    if trainer.save_checkpoint_path is not None:
        return Path(trainer.save_checkpoint_path)
    return Path("checkpoints") / trainer.project_name / trainer.experiment_name
