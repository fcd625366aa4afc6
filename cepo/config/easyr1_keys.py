"""Every key of EasyR1 (commit b44b311): type, default, value in `examples/config.yaml`, and why a default differs here.

What becomes of a key is not written here: a key of the schema is honoured, one of `easyr1.ENGINE_KEYS` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cepo.algorithms.settings import DEFAULT_ESTIMATOR


@dataclass(frozen=True)
class EasyR1Key:
    """`kind` is the type, with `?` where null is accepted; `shipped` holds the value in EasyR1's YAML file, if it has one."""

    kind: str
    default: Any
    shipped: tuple[Any, ...] = ()


def _key(kind: str, default: Any, *shipped: Any) -> EasyR1Key:
    return EasyR1Key(kind, default, shipped)


def _under(prefix: str, keys: Mapping[str, EasyR1Key]) -> dict[str, EasyR1Key]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _with_shipped(keys: Mapping[str, EasyR1Key], **shipped: Any) -> dict[str, EasyR1Key]:
    """The keys, those named with the value that a section's YAML has; all others are absent there."""
    return {
        name: _key(key.kind, key.default, *([shipped[name]] if name in shipped else [])) for name, key in keys.items()
    }


_DATA = {
    "train_files": _key("str", "", "hiyouga/math12k@train"),
    "val_files": _key("str", "", "hiyouga/math12k@test"),
    "prompt_key": _key("str", "prompt", "problem"),
    "answer_key": _key("str", "answer", "answer"),
    "image_key": _key("str", "images", "images"),
    "video_key": _key("str", "videos", "videos"),
    "image_dir": _key("str?", None, None),
    "video_fps": _key("float", 2.0, 2.0),
    "max_prompt_length": _key("int", 512, 2048),
    "max_response_length": _key("int", 512, 2048),
    "rollout_batch_size": _key("int", 512, 512),
    "mini_rollout_batch_size": _key("int?", None, None),
    "val_batch_size": _key("int", -1, 1024),
    "format_prompt": _key("str?", None, "./examples/format_prompt/math.jinja"),
    "override_chat_template": _key("str?", None, None),
    "shuffle": _key("bool", True, True),
    "seed": _key("int", 1, 1),
    "min_pixels": _key("int?", 262144, 262144),
    "max_pixels": _key("int?", 4194304, 4194304),
    "filter_overlong_prompts": _key("bool", True, True),
    "filter_overlong_prompts_workers": _key("int", 16),
}

_ALGORITHM = {
    "gamma": _key("float", 1.0),
    "lam": _key("float", 1.0),
    "adv_estimator": _key("str", DEFAULT_ESTIMATOR, DEFAULT_ESTIMATOR),
    "disable_kl": _key("bool", False, False),
    "use_kl_loss": _key("bool", False, True),
    "kl_penalty": _key("str", "kl", "low_var_kl"),
    "kl_coef": _key("float", 1e-3, 1e-2),
    "kl_type": _key("str", "fixed"),
    "kl_horizon": _key("float", 10000.0),
    "kl_target": _key("float", 0.1),
    "online_filtering": _key("bool", False, False),
    "filter_key": _key("str", "overall", "overall"),
    "filter_low": _key("float", 0.01, 0.01),
    "filter_high": _key("float", 0.99, 0.99),
}

_OPTIM = {
    "lr": _key("float", 1e-6),
    "betas": _key("(float,float)", [0.9, 0.999]),
    "weight_decay": _key("float", 1e-2),
    "strategy": _key("str", "adamw"),
    "lr_warmup_ratio": _key("float", 0.0),
    "lr_warmup_steps": _key("int?", None),
    "min_lr_ratio": _key("float?", None),
    "lr_scheduler_type": _key("str", "constant"),
}

_FSDP = {
    "enable_full_shard": _key("bool", True),
    "enable_cpu_offload": _key("bool", False),
    "enable_rank0_init": _key("bool", True),
    "use_orig_params": _key("bool", False),
    "torch_dtype": _key("str?", None),
    "fsdp_size": _key("int", -1),
    "mp_param_dtype": _key("str", "bf16"),
    "mp_reduce_dtype": _key("str", "fp32"),
    "mp_buffer_dtype": _key("str", "fp32"),
}

_MODEL = {
    "model_path": _key("str?", None),
    "tokenizer_path": _key("str?", None),
    "override_config": _key("dict", {}),
    "enable_gradient_checkpointing": _key("bool", True),
    "trust_remote_code": _key("bool", True),
    "freeze_vision_tower": _key("bool", False),
}

_LORA = {
    "rank": _key("int", 0),
    "alpha": _key("int", 64),
    "target_modules": _key("str", "all-linear"),
    "exclude_modules": _key("str?", None),
}

_OFFLOAD = {"offload_params": _key("bool", False), "offload_optimizer": _key("bool", False)}

_ACTOR = {
    "strategy": _key("str", "fsdp"),
    "global_batch_size": _key("int", 256, 128),
    "micro_batch_size_per_device_for_update": _key("int", 4, 1),
    "micro_batch_size_per_device_for_experience": _key("int", 16, 2),
    "max_grad_norm": _key("float", 1.0, 1.0),
    "clip_ratio_low": _key("float", 0.2),
    "clip_ratio_high": _key("float", 0.3),
    "clip_ratio_dual": _key("float", 3.0),
    "loss_avg_mode": _key("str", "token"),
    "loss_type": _key("str", "default"),
    "ppo_epochs": _key("int", 1),
    "padding_free": _key("bool", True, True),
    "dynamic_batching": _key("bool", True, True),
    "ulysses_size": _key("int", 1, 1),
    "use_torch_compile": _key("bool", True),
    "tau_positive": _key("float", 1.0),
    "tau_negative": _key("float", 1.05),
    **_under(
        "model",
        _with_shipped(
            _MODEL,
            model_path="Qwen/Qwen2.5-7B-Instruct",
            enable_gradient_checkpointing=True,
            trust_remote_code=False,
            freeze_vision_tower=False,
        ),
    ),
    **_under(
        "model.lora",
        _with_shipped(_LORA, rank=0, alpha=64, target_modules="all-linear", exclude_modules=".*visual.*"),
    ),
    **_under("optim", _with_shipped(_OPTIM, lr=1e-6, weight_decay=1e-2, strategy="adamw", lr_warmup_ratio=0.0)),
    **_under("fsdp", _with_shipped(_FSDP, enable_full_shard=True, enable_cpu_offload=False, enable_rank0_init=True)),
    **_under("offload", _with_shipped(_OFFLOAD, offload_params=True, offload_optimizer=True)),
}

_REFERENCE = {
    "strategy": _key("str", "fsdp"),
    **_under("fsdp", _with_shipped(_FSDP, enable_full_shard=True, enable_cpu_offload=True, enable_rank0_init=True)),
    **_under("offload", _with_shipped(_OFFLOAD, offload_params=False)),
}

_CRITIC = {
    "strategy": _key("str", "fsdp"),
    "global_batch_size": _key("int", 256),
    "micro_batch_size_per_device_for_update": _key("int", 4),
    "micro_batch_size_per_device_for_experience": _key("int", 16),
    "max_grad_norm": _key("float", 1.0),
    "cliprange_value": _key("float", 0.5),
    "loss_avg_mode": _key("str", "token"),
    "ppo_epochs": _key("int", 1),
    "padding_free": _key("bool", False),
    "dynamic_batching": _key("bool", True),
    "ulysses_size": _key("int", 1),
    **_under("model", _MODEL),
    **_under("model.lora", _LORA),
    **_under("optim", _OPTIM),
    **_under("fsdp", _FSDP),
    **_under("offload", _OFFLOAD),
}

_ROLLOUT = {
    "name": _key("str", "vllm"),
    "n": _key("int", 1, 5),
    "temperature": _key("float", 1.0, 1.0),
    "top_p": _key("float", 1.0, 1.0),
    "top_k": _key("int", -1),
    "seed": _key("int", 1),
    "limit_images": _key("int", 0, 0),
    "dtype": _key("str", "bf16"),
    "gpu_memory_utilization": _key("float", 0.6, 0.6),
    "ignore_eos": _key("bool", False),
    "enforce_eager": _key("bool", False, False),
    "enable_chunked_prefill": _key("bool", False, False),
    "tensor_parallel_size": _key("int", 2, 2),
    "max_model_len": _key("int?", None),
    "max_num_batched_tokens": _key("int", 8192),
    "disable_log_stats": _key("bool", True),
    "disable_tqdm": _key("bool", False, False),
    "val_override_config": _key("dict", {}, {"temperature": 0.6, "top_p": 0.95, "n": 1}),
}

_REWARD = {
    "reward_function": _key("str?", None, "./examples/reward_function/math.py:compute_score"),
    "reward_function_kwargs": _key("dict", {}),
    "skip_special_tokens": _key("bool", True),
    "num_cpus": _key("int", 1),
}

_TRAINER = {
    "total_epochs": _key("int", 15, 15),
    "max_steps": _key("int?", None, None),
    "project_name": _key("str", "easy_r1", "easy_r1"),
    "experiment_name": _key("str", "demo", "qwen2_5_7b_math_grpo"),
    "logger": _key("list", ["console", "wandb"], ["file", "wandb"]),
    "nnodes": _key("int", 1, 1),
    "n_gpus_per_node": _key("int", 8, 8),
    "max_try_make_batch": _key("int", 20, 20),
    "critic_warmup": _key("int", 0),
    "val_freq": _key("int", -1, 5),
    "val_before_train": _key("bool", True, True),
    "val_only": _key("bool", False, False),
    "val_generations_to_log": _key("int", 0, 3),
    "save_freq": _key("int", -1, 5),
    "save_limit": _key("int", -1, 3),
    "save_model_only": _key("bool", False, False),
    "save_checkpoint_path": _key("str?", None, None),
    "load_checkpoint_path": _key("str?", None, None),
    "ray_timeline": _key("str?", None),
    "find_last_checkpoint": _key("bool", True, True),
}

EASYR1_KEYS: Mapping[str, EasyR1Key] = {
    **_under("data", _DATA),
    **_under("algorithm", _ALGORITHM),
    "worker.hybrid_engine": _key("bool", True),
    **_under("worker.actor", _ACTOR),
    **_under("worker.ref", _REFERENCE),
    **_under("worker.critic", _CRITIC),
    **_under("worker.rollout", _ROLLOUT),
    **_under("worker.reward", _REWARD),
    **_under("trainer", _TRAINER),
}

INTERNAL_KEYS = (
    "worker.rollout.prompt_length",
    "worker.rollout.response_length",
    "worker.rollout.trust_remote_code",
    "worker.actor.disable_kl",
    "worker.actor.use_kl_loss",
    "worker.actor.kl_penalty",
    "worker.actor.kl_coef",
    "worker.actor.global_batch_size_per_device",
    "worker.actor.optim.training_steps",
    "worker.critic.global_batch_size_per_device",
    "worker.critic.optim.training_steps",
    "worker.ref.micro_batch_size_per_device_for_experience",
    "worker.ref.padding_free",
    "worker.ref.dynamic_batching",
    "worker.ref.ulysses_size",
    "worker.ref.use_torch_compile",
    "worker.reward.reward_function_name",
)
"""Fields that EasyR1 fills itself; its shipped scripts set one of them, so they are accepted, without effect as there."""

_OPT_IN_CODE = "code that comes with a model runs only where that is asked for"

_OWN_READING = "processes of a machine read the same file, which is in memory after the first"

OTHER_DEFAULTS: Mapping[str, str] = {
    "data.train_files": "a run names its data; EasyR1 fails later without it",
    "data.val_files": "no validation; EasyR1's empty text is taken for it",
    "worker.actor.clip_ratio_high": "the paper's value",
    "worker.actor.model.model_path": "a run names its model",
    "worker.actor.model.trust_remote_code": _OPT_IN_CODE,
    "worker.actor.model.lora.exclude_modules": "as in EasyR1's YAML file: vLLM serves no adapter on a vision tower",
    "worker.critic.global_batch_size": "the actor's, so that both take the same number of steps",
    "worker.critic.model.trust_remote_code": _OPT_IN_CODE,
    "worker.actor.fsdp.enable_rank0_init": _OWN_READING,
    "worker.critic.fsdp.enable_rank0_init": _OWN_READING,
    "worker.rollout.tensor_parallel_size": "an engine on every device, so that a run starts on one",
    "worker.rollout.name": "vLLM where it is installed, transformers elsewhere",
    "worker.reward.reward_function": "the built-in verifier; EasyR1's null fails later and is taken for it",
    "trainer.project_name": "runs of this package are told from EasyR1's",
    "trainer.logger": "wandb needs an extra and an account",
    "trainer.n_gpus_per_node": "one device, so that a run starts on any machine",
}
"""Honoured keys whose default is not EasyR1's, each with the reason."""

OTHER_MEANINGS: Mapping[str, str] = {
    "data.format_prompt": "a missing file is an error; EasyR1 goes on without it",
    "data.filter_overlong_prompts": "false: an overlong row is an error; EasyR1 cuts it",
    "algorithm.gamma": "a value in the method's own section wins",
    "algorithm.lam": "sets `gae_lambda`; a value in the method's own section wins",
    "algorithm.kl_penalty": "`full`, unusable in EasyR1, is the KL over the whole vocabulary",
    "worker.actor.loss_type": "an unknown name is an error; EasyR1 trains the default",
    "worker.actor.loss_avg_mode": "`seq` does not depend on the micro-batches",
    "worker.actor.optim.strategy": "`adamw_bf16` keeps the second moment in float32",
    "worker.actor.optim.lr_warmup_steps": "the first step trains; EasyR1's has a learning rate of 0",
    "worker.critic.model.model_path": "null: the actor's; EasyR1 has no model then",
    "worker.rollout.seed": "combined with step and prompt; EasyR1 gives every request the same seed",
    "worker.reward.num_cpus": "processes that score responses",
    "trainer.max_try_make_batch": "then the batch is filled; EasyR1 stops",
    "trainer.load_checkpoint_path": "a wrong path is an error; EasyR1 starts anew",
    "trainer.save_limit": "1 keeps the best beside the last",
}
"""Keys with EasyR1's default that do more, or do it more strictly."""
