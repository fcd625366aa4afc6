"""Finds conflicts between settings before heavy work starts, and returns the plan of the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator

from cepo.algorithms.settings import SharedSettings
from cepo.config.path_checks import require_data, require_file, require_folder, require_model
from cepo.config.paths import MICROGEO_MODELS, PACKAGE_FOLDER, find_path, split_function, split_source, without_user
from cepo.config.schema import AlgorithmConfig, RunConfig
from cepo.config.worker_schema import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RewardConfig
from cepo.errors import ConfigError, ForeignFileError
from cepo.files.safe_files import hub_folder, read_json
from cepo.files.trees import Tree, is_mapping, leaves
from cepo.run_folder.layout import last_checkpoint
from cepo.sections.fields import condition_of
from cepo.sections.messages import written
from cepo.sections.reader import default_tree

SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11, "fp32": 24}
LEAST_PIXELS = 64 * 64
"""A limit on an image's pixels below this is likely meant as a side or as a number of tokens."""
INSTALL_BITSANDBYTES = "pip install 'bitsandbytes>=0.49'"


def check_config(config: RunConfig) -> list[str]:
    """Checks all settings of a run together and returns its plan for the log, one fact per line.

    Raises `ConfigError` if a method's section is invalid, settings are in conflict, or files are missing; the message has
    all faults.
    """
    checks = (
        _check_batches,
        _check_lengths,
        _check_method,
        _check_algorithm,
        _check_model,
        _check_engine,
        _check_mixing,
        _check_validation,
        _check_devices,
        _check_files,
    )
    faults: list[str] = []
    for check in checks:
        for fault in _faults_of(check, config):
            if fault not in faults:  # several checks may read the same faulty value
                faults.append(fault)
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise ConfigError(f"{len(faults)} faults in the settings:{listed}")
    return plan_lines(config)


def _faults_of(check: Callable[..., Iterable[str] | None], *arguments: object) -> Iterator[str]:
    """Yields what a check finds, or the `ConfigError` that it raises; it ends with a value that is itself at fault."""
    try:
        yield from check(*arguments) or ()
    except ConfigError as error:
        yield str(error)


def _check_batches(config: RunConfig) -> Iterator[str]:
    rollout = config.data.rollout_batch_size
    devices = config.trainer.num_devices
    sections = {"actor": (config.worker.actor.global_batch_size, config.worker.actor.fsdp.fsdp_size)}
    if config.needs_critic:
        critic = config.worker.resolved_critic
        sections["critic"] = (critic.global_batch_size or 0, critic.fsdp.fsdp_size)
    for worker, (update, shards) in sections.items():
        key = f"worker.{worker}.global_batch_size={update} prompts"
        if rollout % update:
            divisors = ", ".join(str(size) for size in range(1, rollout + 1) if rollout % size == 0)
            yield (
                f"data.rollout_batch_size={rollout} prompts cannot be split into optimizer steps of {key}. "
                f"Set global_batch_size to a divisor of {rollout}: {divisors}."
            )
        responses = config.worker.rollout.n * update
        if responses < devices:
            yield (
                f"{key} x worker.rollout.n={config.worker.rollout.n} are {responses} responses per optimizer step, fewer "
                f"than the {devices} devices. Raise global_batch_size."
            )
        if 0 < shards < devices and devices % shards:
            yield (
                f"worker.{worker}.fsdp.fsdp_size={shards} does not divide the run's {devices} devices "
                "(trainer.nnodes x trainer.n_gpus_per_node). Set it to a divisor, or to -1 for all of them."
            )


def _check_lengths(config: RunConfig) -> Iterator[str]:
    data = config.data
    rollout = config.worker.rollout
    model = config.worker.actor.model
    least = data.longest_row
    parts = f"data.max_prompt_length + data.max_response_length = {data.max_prompt_length} + {data.max_response_length}"
    longest = rollout.max_model_len or least
    if longest < least:
        yield (
            f"worker.rollout.max_model_len={longest} is below {parts} = {least}. Set it to at least {least}, or to null."
        )
    origin = "worker.rollout.max_model_len" if rollout.max_model_len else parts
    length = f"context length {longest} ({origin})"
    positions = _positions_of(model)
    if positions is not None and positions < longest:
        room_for_response = positions - data.max_prompt_length
        lower = f"it to at most {positions}"
        if longest == least and room_for_response > 0:
            lower = f"data.max_response_length to at most {room_for_response}"
        yield (
            f"The model {model.model_path} has positions for {positions} tokens (max_position_embeddings), and the {length} "
            f"is larger. Lower {lower}."
        )
    if rollout.max_num_batched_tokens < longest:
        yield (
            f"worker.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below the {length}. "
            f"Set it to at least {longest}, or lower those."
        )
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        yield f"data.min_pixels={data.min_pixels} is above data.max_pixels={data.max_pixels}."


def _positions_of(model: ModelConfig) -> int | None:
    """Returns `max_position_embeddings` of a model in a local folder, after `override_config`; None if unknown."""
    embedded = model.model_path in MICROGEO_MODELS
    folder = PACKAGE_FOLDER / "microgeo" / "assets" if embedded else find_path(model.model_path)
    settings: Tree = {}
    if folder is not None and (folder / "config.json").is_file():
        try:
            settings = read_json(folder / "config.json", dict, within=hub_folder(folder))
        except ForeignFileError as error:
            raise ConfigError(f"worker.actor.model.model_path: {error}.") from error
    for tree in (model.override_config, settings):
        for section in (tree, tree.get("text_config")):
            if is_mapping(section):
                positions = section.get("max_position_embeddings")
                if isinstance(positions, int):
                    return positions
    return None


def _check_method(config: RunConfig) -> Iterator[str]:
    name = config.algorithm.adv_estimator
    estimator = config.estimator
    yield from _faults_of(require_file, "algorithm.teacher.template", estimator.teacher.template)
    teacher_path = estimator.teacher.model_path
    if teacher_path in MICROGEO_MODELS:
        yield f"algorithm.teacher.model_path={teacher_path} is where the toy task's policy starts: set source to reference."
    if "group_ids" in estimator.reads and config.worker.rollout.n == 1:
        yield (
            f"worker.rollout.n=1 with algorithm.adv_estimator={name}: this method compares the responses to one prompt "
            "with one another. Set worker.rollout.n to at least 2."
        )


def _check_algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        yield (
            f"algorithm.filter_low={algorithm.filter_low} is not below algorithm.filter_high={algorithm.filter_high}: "
            "online filtering would keep nothing"
        )
    temperature = config.worker.rollout.temperature
    correction = config.worker.actor.rollout_is
    if correction != "none" and temperature != 1.0:
        yield (
            f"worker.actor.rollout_is={correction} with worker.rollout.temperature={temperature}: the engine's log-probs "
            "are at temperature 1 and cannot be compared with the trainer's. Set rollout_is=none, or temperature=1."
        )
    if algorithm.kl_type == "adaptive" and algorithm.use_kl_loss and not algorithm.disable_kl:
        yield (
            "algorithm.kl_type=adaptive follows a KL in the reward; set algorithm.use_kl_loss=false, or kl_type=fixed"
        )


def _check_engine(config: RunConfig) -> Iterator[str]:
    rollout = config.worker.rollout
    if rollout.name == "transformers" and rollout.quantization is not None:
        yield (
            "worker.rollout.quantization is a setting of vLLM, but worker.rollout.name=transformers. Remove it, or set name "
            "to auto or vllm."
        )
    elif rollout.quantization is not None and config.worker.actor.rollout_is == "none":
        yield (
            f"worker.rollout.quantization={rollout.quantization} with worker.actor.rollout_is=none: vLLM would sample from "
            "other probabilities than the trainer's, and nothing would correct for it. Set rollout_is=truncate or mask, or "
            "quantization=null."
        )


def _check_model(config: RunConfig) -> Iterator[str]:
    lora = config.worker.actor.model.lora
    key = "worker.actor.model.lora"
    for name, value in (("use_dora", "true" if lora.use_dora else None), ("quantization", lora.quantization)):
        if value is not None and lora.rank == 0:
            yield f"{key}.{name}={value} needs an adapter. Set {key}.rank, such as 16."
    if lora.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        yield f"{key}.quantization={lora.quantization} needs bitsandbytes: {INSTALL_BITSANDBYTES}."


def _check_mixing(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.train_weights is not None and len(data.train_weights) != len(data.train_sources):
        yield (
            f"data.train_weights={data.train_weights} has {len(data.train_weights)} entries, and data.train_files names "
            f"{len(data.train_sources)} training sets. Give one weight for each, or null."
        )


def _check_validation(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.data.val_files is not None:
        return
    reasons: list[str] = []
    if trainer.val_only:
        reasons.append("trainer.val_only=true")
    if trainer.val_before_train:
        reasons.append("trainer.val_before_train=true")
    if trainer.val_freq > 0:
        reasons.append(f"trainer.val_freq={trainer.val_freq}")
    if reasons:
        yield (
            f"data.val_files is null, but {', '.join(reasons)} asks for validation. Set data.val_files, or "
            "trainer.val_before_train=false trainer.val_freq=-1 trainer.val_only=false."
        )


def _check_devices(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    devices = trainer.num_devices
    product = f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if devices > 1 and trainer.launcher == "local":
        yield (
            f"{product} are {devices} devices, and trainer.launcher=local drives one. Set it to auto, or both numbers to 1."
        )
    if config.trainer.chosen_launcher == "ray" and importlib.util.find_spec("ray") is None:
        yield f"{product} with trainer.launcher={trainer.launcher} need Ray: pip install 'ray>=2.52'."
    group = config.worker.rollout.tensor_parallel_size
    if trainer.n_gpus_per_node % group:
        yield (
            f"worker.rollout.tensor_parallel_size={group} does not divide trainer.n_gpus_per_node={trainer.n_gpus_per_node}: "
            f"the devices of one machine share an engine. Set it to a divisor of {trainer.n_gpus_per_node}."
        )
    if group > 1 and config.worker.rollout.name == "transformers":
        yield (
            f"worker.rollout.tensor_parallel_size={group} with worker.rollout.name=transformers: its engine lives on one "
            "device. Set it to 1, or worker.rollout.name to vllm."
        )


def _check_files(config: RunConfig) -> Iterator[str]:
    data = config.data
    trainer = config.trainer
    for key, source in config.named_data:
        yield from _faults_of(require_data, key, source)
    for key, model in config.named_models:
        yield from _faults_of(require_model, key, model)
    yield from _faults_of(require_file, "data.format_prompt", data.format_prompt)
    yield from _faults_of(require_file, "data.override_chat_template", data.override_chat_template)
    yield from _check_rewards(config.worker.reward)
    for path in trainer.plugins:
        yield from _faults_of(require_file, "trainer.plugins", path)
    yield from _faults_of(require_folder, "data.image_dir", data.image_dir)
    if trainer.load_checkpoint_path is not None:
        yield from _faults_of(_check_checkpoint, "trainer.load_checkpoint_path", trainer.load_checkpoint_path)


def _check_checkpoint(key: str, path: str) -> None:
    if path in ("latest", "last", "auto") and find_path(path) is None:
        raise ConfigError(f"{key}={path}: leave it out; a run goes on from its last checkpoint by itself.")
    require_folder(key, path)
    folder = without_user(path)
    checkpoint = last_checkpoint(folder)
    if checkpoint == folder:
        return
    remedy = "give a folder global_step_<N>"
    if checkpoint is not None:
        remedy = f"its last one is {checkpoint}; give that"
    elif (folder / "config.json").is_file():
        remedy = "it is a model: give it as worker.actor.model.model_path"
    raise ConfigError(f"{key}={path} is not a complete checkpoint: it has no trainer_state.json; {remedy}.")


def _check_rewards(reward: RewardConfig) -> Iterator[str]:
    key = "worker.reward.reward_function"
    functions = reward.reward_functions
    for name in functions:
        yield from _faults_of(_require_function, key, name)
    if reward.answer_function is not None:
        yield from _faults_of(_require_function, "worker.reward.answer_function", reward.answer_function)
    if reward.reward_weights is not None and len(reward.reward_weights) != len(functions):
        yield (
            f"worker.reward.reward_weights={reward.reward_weights} has {len(reward.reward_weights)} entries, and {key} names "
            f"{len(functions)} functions. Give one weight for each, or null for 1 each."
        )


def _require_function(key: str, name: str) -> None:
    name = name.removeprefix(":")  # what is left of a text without a colon
    file, function = split_function(name)
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"{key}={name} must have the form path/file.py:function.")
    require_file(key, file)


def plan_lines(config: RunConfig) -> list[str]:
    data = config.data
    rollout = config.worker.rollout
    trainer = config.trainer
    method = config.algorithm.adv_estimator
    views = config.estimator.views
    longest = data.longest_row
    lines = [
        f"method: {method}, teacher views: {', '.join(views) or 'none'}",
        f"samples per step: {_samples_in_words(config)}",
        f"optimizer updates per step: {_updates_in_words(config)}",
        f"tokens per sample: at most {data.max_prompt_length} + {data.max_response_length} = {longest}",
        f"trained weights: {_trained_weights_in_words(config.worker.actor.model)}",
        f"length: {trainer.total_epochs} epochs" if trainer.max_steps is None else f"length: {trainer.max_steps} steps",
        f"learning rate: {_learning_rate_in_words(config.worker.actor.optim)}",
        f"devices: {_devices_in_words(config)}",
        f"validation: {data.val_files or 'none (data.val_files is null)'}",
        f"run folder: {trainer.run_folder}",
    ]
    if config.needs_critic:
        critic = config.worker.resolved_critic
        assert critic.global_batch_size is not None
        steps = data.rollout_batch_size // critic.global_batch_size * critic.ppo_epochs
        lines.append(
            f"critic: all weights of {critic.model.model_path}, {steps} optimizer updates per step, "
            f"learning rate {critic.optim.lr:g}"
        )
    lines += [
        f"note: {line}" for line in (*_settings_not_read(config), *_lost_to_rounding(config), *_likely_mistakes(config))
    ]
    if config.set_with_method:
        changes: list[str] = []
        for key, (value, value_otherwise) in config.set_with_method.items():
            changes.append(f"{key}={value} (else {value_otherwise})")
        changed = ", ".join(changes)
        lines.append(
            f"note: the configuration that chooses {method} also sets {changed}; a fair comparison with another method keeps "
            "this configuration and overrides algorithm.adv_estimator alone"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        lines.append(
            "note: top_p or top_k truncates the distribution that is sampled; log-probs are those of the whole distribution"
        )
    return lines


def _likely_mistakes(config: RunConfig) -> list[str]:
    """Returns values that are accepted and seldom meant: validation on training data, and images of few pixels."""
    data = config.data
    lines: list[str] = []
    if data.val_files is not None and any(_has_rows_of(source, data.val_files) for source in data.train_sources):
        lines.append(
            f"data.val_files={data.val_files} is trained on too, so its accuracy says nothing of other problems"
        )
    if data.max_pixels is not None and data.max_pixels < LEAST_PIXELS:
        side = math.isqrt(data.max_pixels)
        lines.append(
            f"data.max_pixels={data.max_pixels} is an image's width times its height, neither a side nor tokens: images are "
            f"reduced to about {side} x {side}"
        )
    return lines


def _has_rows_of(source: str, other: str) -> bool:
    """Returns whether a data source is another one, or all of what the other is a slice of."""
    path, split = split_source(source)
    other_path, other_split = split_source(other)
    whole_split = (other_split or "train").partition("[")[0]
    return source == other or (path == other_path and (split or "train") == whole_split)


def _settings_not_read(config: RunConfig) -> list[str]:
    """Returns changed settings of `algorithm` that the chosen method does not read, or that another setting turns off."""
    algorithm = config.algorithm
    method = algorithm.adv_estimator
    defaults = dict(leaves(default_tree(AlgorithmConfig)))
    of_methods = dict(leaves(default_tree(SharedSettings)))
    of_this_method = dict(leaves(config.methods[method]))
    lines: list[str] = []
    for key, value in leaves(dataclasses.asdict(algorithm)):
        if key not in defaults or value == defaults[key]:
            continue
        reason = None
        condition = condition_of(AlgorithmConfig, key)
        if key in of_methods and key not in of_this_method:
            reason = f"{method} does not read it"
        elif condition is not None and getattr(algorithm, condition.name) != condition.value:
            reason = f"algorithm.{condition.name}={written(not condition.value)}"
        if reason is not None:
            lines.append(f"algorithm.{key}={written(value)} has no effect: {reason}")
    return lines


def _lost_to_rounding(config: RunConfig) -> list[str]:
    """Returns for each worker that stores its weights in 16 bits which of them a step of plain AdamW leaves as they are.

    Adam moves a weight by about the learning rate, and a number of b significant bits changes by no less than its
    2^(b + 1)-th part.
    """
    workers: dict[str, ActorConfig | CriticConfig] = {"actor": config.worker.actor}
    if config.needs_critic:
        workers["critic"] = config.worker.resolved_critic
    lines: list[str] = []
    for name, worker in workers.items():
        bits = SIGNIFICANT_BITS[worker.fsdp.torch_dtype or "fp32"]
        optim = worker.optim
        if bits < SIGNIFICANT_BITS["fp32"] and optim.strategy == "adamw" and optim.lr > 0:
            lines.append(
                f"worker.{name}.fsdp.torch_dtype={worker.fsdp.torch_dtype} rounds away what a step of about "
                f"lr={optim.lr:g} adds to weights above {optim.lr * 2 ** (bits + 1):.2g}, so they hardly learn. "
                f"worker.{name}.optim.strategy=adamw_bf16 carries it on to later steps, and "
                "fsdp.torch_dtype=fp32 loses none of it"
            )
    return lines


def _samples_in_words(config: RunConfig) -> str:
    num_prompts = config.data.rollout_batch_size
    num_responses = config.worker.rollout.n
    samples = num_prompts * num_responses
    words = f"{num_prompts} prompts x {num_responses} responses = {samples}"
    devices = config.trainer.num_devices
    if devices > 1:
        words += f", on each of {devices} devices at most {math.ceil(samples / devices)}"
    return words


def _updates_in_words(config: RunConfig) -> str:
    data = config.data
    actor = config.worker.actor
    updates = data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    samples_per_update = actor.global_batch_size * config.worker.rollout.n
    size = actor.micro_batch_size_per_device_for_update
    if size == 0:
        passes = "passes that the device's memory decides"
    elif actor.dynamic_batching:
        passes = f"passes of at most {size * data.longest_row} tokens"
    else:
        passes = f"{math.ceil(samples_per_update / size)} micro-batches of at most {size}"
    return f"{updates}, each over {samples_per_update} samples in {passes}"


def _trained_weights_in_words(model: ModelConfig) -> str:
    lora = model.lora
    words = "all"
    if lora.rank:
        adapter = "DoRA" if lora.use_dora else "LoRA"
        if lora.quantization is not None:
            adapter = f"Q{adapter} ({lora.quantization})"
        words = f"{adapter}, rank {lora.rank}, scale {lora.alpha / lora.rank:g}"
    if model.freeze_vision_tower:
        words += ", vision tower frozen"
    return words


def _learning_rate_in_words(optim: OptimConfig) -> str:
    warm_up = f"{optim.lr_warmup_ratio:g} of the steps warm-up"
    if optim.lr_warmup_steps is not None:
        warm_up = f"{optim.lr_warmup_steps} warm-up steps"
    return f"{optim.lr:g}, {optim.lr_scheduler_type}, {warm_up}"


def _devices_in_words(config: RunConfig) -> str:
    trainer = config.trainer
    devices = trainer.num_devices
    if config.trainer.chosen_launcher == "local":
        return "one, in this process"
    words = f"{devices} ({trainer.nnodes} x {trainer.n_gpus_per_node}), one worker each under Ray"
    if config.worker.actor.global_batch_size < devices:
        idle = devices - config.worker.actor.global_batch_size
        words += f"; an optimizer step has {config.worker.actor.global_batch_size} prompts, so {idle} devices are idle"
    return words
