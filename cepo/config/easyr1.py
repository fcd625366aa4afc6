"""EasyR1's keys that this release accepts without reading them, each with the reason a user is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cepo.config.easyr1_keys import EASYR1_KEYS, INTERNAL_KEYS
from cepo.config.sources import Origins
from cepo.config.values import convert
from cepo.errors import did_you_mean

logger = logging.getLogger(__name__)

_MISSING = object()
_KINDS: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "dict": Mapping[str, Any]}


@dataclass(frozen=True)
class EngineKey:
    """Why a key has no effect; `only` are the values that may be given, where another would change the result."""

    reason: str
    only: tuple[Any, ...] | None = None
    remedy: str = ""


_FSDP1 = "FSDP2 is used, which has no such setting"
_NO_REFERENCE_MODEL = "no separate reference model is built by this release"
_DERIVED = "it follows from other keys"

_OF_A_TRAINED_MODEL: Mapping[str, EngineKey] = {
    "strategy": EngineKey("FSDP2 is the only strategy"),
    "ulysses_size": EngineKey("sequences are not split", (1,), "Sequence parallelism is not available."),
    "global_batch_size_per_device": EngineKey(_DERIVED),
    "optim.training_steps": EngineKey(_DERIVED),
    "fsdp.use_orig_params": EngineKey(_FSDP1),
    "fsdp.mp_buffer_dtype": EngineKey(_FSDP1),
}

ENGINE_KEYS: Mapping[str, EngineKey] = {
    "data.filter_overlong_prompts_workers": EngineKey("one process checks about 1,000 rows with images per second"),
    "worker.hybrid_engine": EngineKey("trainer and generator always share the device", (True,), "Leave it out."),
    **{f"worker.actor.{key}": entry for key, entry in _OF_A_TRAINED_MODEL.items()},
    **{f"worker.actor.{name}": EngineKey(_DERIVED) for name in ("disable_kl", "use_kl_loss", "kl_penalty", "kl_coef")},
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
    "trainer.ray_timeline": EngineKey("no timeline of Ray is written"),
}

NONE_GIVEN: Mapping[str, Any] = {
    "data.train_files": "",
    "data.val_files": "",
    "worker.actor.model.model_path": None,
    "worker.reward.reward_function": None,
}
"""EasyR1's defaults that stand for no value."""


def is_engine_key(key: str) -> bool:
    """Whether a dotted key, or a section around it, is one that EasyR1 has and this release does not read."""
    return engine_key_of(key) is not None


def engine_key_of(key: str) -> EngineKey | None:
    """Why a dotted key has no effect; None for a key that has one, or that is unknown."""
    parts = key.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((ENGINE_KEYS[name] for name in around if name in ENGINE_KEYS), None)


def drop_empty_values(tree: dict[str, Any]) -> None:
    """Take out of a resolved tree what says "none given" in EasyR1, so that this package's default applies or is asked for."""
    for key, empty in NONE_GIVEN.items():
        section, _, name = key.rpartition(".")
        around = _value_at(tree, section)
        if isinstance(around, dict) and name in around and around[name] == empty:
            del around[name]


def refuse_unknown_engine_keys(key: str, value: Any, origins: Origins) -> None:
    """Raise `ConfigError` where a section that this release does not read holds a key that EasyR1 does not have."""
    known = [*EASYR1_KEYS, *INTERNAL_KEYS]
    for leaf, below in _leaves(key, value):
        section = f"{leaf}."
        if leaf in known or (below is None and any(name.startswith(section) for name in known)):
            continue
        siblings = [name for name in known if name.startswith(f"{key.rpartition('.')[0]}.")]
        raise origins.error(leaf, f"unknown key '{leaf}'.{did_you_mean(leaf, siblings)}")


def refuse_engine_keys(tree: Mapping[str, Any], origins: Origins) -> None:
    """Raise `ConfigError` for a value of the wrong type, or one that asks for what this release does not do."""
    for section in ENGINE_KEYS:
        for key, value in _leaves(section, _value_at(tree, section)):
            if key in EASYR1_KEYS and value is not _MISSING:
                kind = EASYR1_KEYS[key].kind
                hint = _KINDS[kind.removesuffix("?")]
                convert(value, hint | None if kind.endswith("?") else hint, key=key, origins=origins)
    for key, entry in ENGINE_KEYS.items():
        value = _value_at(tree, key)
        if value is _MISSING or entry.only is None:
            continue
        if not any(value == only and type(value) is type(only) for only in entry.only):
            accepted = str(entry.only[0]).lower()
            raise origins.error(key, f"{key} must be {accepted}, got {str(value).lower()}. {entry.remedy}")


def report_engine_keys(tree: Mapping[str, Any], origins: Origins) -> None:
    """Log one notice that lists the engine keys of the resolved tree with their places, by the reason they have no effect."""
    by_reason: dict[str, list[str]] = {}
    for section, entry in ENGINE_KEYS.items():
        for key, value in _leaves(section, _value_at(tree, section)):
            if value is not _MISSING:
                by_reason.setdefault(entry.reason, []).append(f"{key} ({origins.place_of(key)})")
    if by_reason:
        lines = [f"\n  {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]
        count = sum(map(len, by_reason.values()))
        logger.warning("%d EasyR1 key%s without effect here:%s", count, "s" if count > 1 else "", "".join(lines))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The key itself, or the dotted keys below it where EasyR1 has a section of that name."""
    if isinstance(value, Mapping) and key not in EASYR1_KEYS:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value


def _value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or the marker of a missing one."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _MISSING
        tree = tree[part]
    return tree
