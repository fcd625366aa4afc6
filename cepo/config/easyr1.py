"""EasyR1's keys that this release accepts without reading them, each with the reason a user is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cepo.config.sources import Origins

logger = logging.getLogger(__name__)

_MISSING = object()


@dataclass(frozen=True)
class EngineKey:
    """Why a key has no effect; `only` are the values that may be given, where another would change the result."""

    reason: str
    only: tuple[Any, ...] | None = None
    remedy: str = ""


_FSDP1 = "FSDP2 is used, which has no such setting"
_NO_OFFLOAD = "weights and optimizer state stay on the device; offloading is not used by this release"
_NO_REFERENCE_MODEL = "no separate reference model is built by this release"
_NO_VIDEO = "videos are not read by this release"
_DERIVED = "it follows from other keys"

_OF_A_TRAINED_MODEL: Mapping[str, EngineKey] = {
    "strategy": EngineKey("FSDP2 is the only strategy"),
    "ulysses_size": EngineKey("sequences are not split", (1,), "Sequence parallelism is not available."),
    "global_batch_size_per_device": EngineKey(_DERIVED),
    "optim.training_steps": EngineKey(_DERIVED),
    "fsdp.use_orig_params": EngineKey(_FSDP1),
    "fsdp.enable_cpu_offload": EngineKey(_NO_OFFLOAD),
    "fsdp.enable_rank0_init": EngineKey("how weights are read is not a setting of this release"),
    "fsdp.fsdp_size": EngineKey("weights are sharded over all devices"),
    "fsdp.mp_buffer_dtype": EngineKey(_FSDP1),
    "offload": EngineKey(_NO_OFFLOAD),
}

ENGINE_KEYS: Mapping[str, EngineKey] = {
    "data.video_key": EngineKey(_NO_VIDEO),
    "data.video_fps": EngineKey(_NO_VIDEO),
    "data.filter_overlong_prompts_workers": EngineKey("the length filter runs in one process"),
    "algorithm.gamma": EngineKey("each method has its own", (1, 1.0), "Set gamma in the method's own section."),
    "algorithm.lam": EngineKey("each method has its own", (1, 1.0), "Set gae_lambda in the method's own section."),
    "worker.hybrid_engine": EngineKey("trainer and generator always share the device", (True,), "Leave it out."),
    **{f"worker.actor.{key}": entry for key, entry in _OF_A_TRAINED_MODEL.items()},
    "worker.actor.use_torch_compile": EngineKey("nothing is compiled by this release"),
    "worker.ref": EngineKey(_NO_REFERENCE_MODEL),
    **{f"worker.critic.{key}": entry for key, entry in _OF_A_TRAINED_MODEL.items()},
    "worker.critic.model.tokenizer_path": EngineKey("the critic reads the tokens that the actor reads"),
    "worker.critic.model.lora": EngineKey("the critic trains all its weights, as in EasyR1"),
    "worker.rollout.prompt_length": EngineKey(_DERIVED),
    "worker.rollout.response_length": EngineKey(_DERIVED),
    "worker.rollout.trust_remote_code": EngineKey(_DERIVED),
    "worker.rollout.enable_chunked_prefill": EngineKey("vLLM decides"),
    "worker.rollout.disable_log_stats": EngineKey("vLLM's own statistics are not shown"),
    "worker.reward.reward_function_name": EngineKey(_DERIVED),
    "trainer.save_model_only": EngineKey("a checkpoint always holds what a resume needs"),
    "trainer.ray_timeline": EngineKey("this release does not start Ray"),
}


def is_engine_key(key: str) -> bool:
    """Whether a dotted key, or a section around it, is one that EasyR1 has and this release does not read."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in ENGINE_KEYS for end in range(1, len(parts) + 1))


def refuse_engine_keys(tree: Mapping[str, Any], origins: Origins) -> None:
    """Raise `ConfigError` where a key of the resolved tree asks for something that this release does not do."""
    for key, entry in ENGINE_KEYS.items():
        value = _value_at(tree, key)
        if value is _MISSING or entry.only is None:
            continue
        if not any(value == only and type(value) is type(only) for only in entry.only):
            accepted = str(entry.only[0]).lower()
            raise origins.error(key, f"{key} must be {accepted}, got {str(value).lower()}. {entry.remedy}")


def report_engine_keys(tree: Mapping[str, Any], origins: Origins) -> None:
    """Log one notice for each engine key in the resolved tree."""
    reasons = {key: entry.reason for key, entry in ENGINE_KEYS.items()}
    for key, reason in reasons.items():
        if _value_at(tree, key) is not _MISSING:
            logger.warning("%s: %s has no effect: %s.", origins.place_of(key), key, reason)


def _value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or the marker of a missing one."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _MISSING
        tree = tree[part]
    return tree
