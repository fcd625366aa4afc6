"""EasyR1's keys that this release accepts without reading them, each with the reason a user is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cepo.config.easyr1_keys import EASYR1_KEYS, INTERNAL_KEYS
from cepo.config.listing import written
from cepo.config.sources import Origins
from cepo.errors import did_you_mean
from cepo.sections import Tree
from cepo.sections import section as pydantic_section

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "dict": Mapping[str, Any]}


@dataclass(frozen=True)
class EngineKey:
    """Why a key has no effect; `only` is the value that may be given, where another would change the result."""

    reason: str
    only: bool | int | None = None
    remedy: str = ""


_FSDP1 = "FSDP2 is used, which has no such setting"
_NO_REFERENCE_MODEL = "no separate reference model is built by this release"
_DERIVED = "it follows from other keys"

_OF_A_TRAINED_MODEL: Mapping[str, EngineKey] = {
    "strategy": EngineKey("FSDP2 is the only strategy"),
    "ulysses_size": EngineKey("sequences are not split", 1, "Sequence parallelism is not available."),
    "global_batch_size_per_device": EngineKey(_DERIVED),
    "optim.training_steps": EngineKey(_DERIVED),
    "fsdp.use_orig_params": EngineKey(_FSDP1),
    "fsdp.mp_buffer_dtype": EngineKey(_FSDP1),
}

ENGINE_KEYS: Mapping[str, EngineKey] = {
    "data.filter_overlong_prompts_workers": EngineKey("one process checks about 1,000 rows with images per second"),
    "worker.hybrid_engine": EngineKey("trainer and generator always share the device", True, "Leave it out."),
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
        *sections, name = key.split(".")
        around: Any = tree
        for section in sections:
            around = around[section] if isinstance(around, dict) else {}
        if name in around and around[name] == empty:
            del around[name]


def without_engine_keys(tree: Tree, origins: Origins) -> tuple[Tree, Tree]:
    """The resolved tree without the keys that have no effect, and these by dotted key.

    Raises:
        ConfigError: a key that EasyR1 does not have, a value of the wrong type, or one that asks for what is not done.
    """
    without_effect: Tree = {}

    def kept(section: Tree, path: str) -> Tree:
        result: Tree = {}
        for name, value in section.items():
            key = f"{path}{name}"
            entry = engine_key_of(key)
            if entry is not None:
                without_effect.update({leaf: _accepted(leaf, below, origins) for leaf, below in _leaves(key, value)})
            elif isinstance(value, dict) and any(engine.startswith(f"{key}.") for engine in ENGINE_KEYS):
                result[name] = kept(value, f"{key}.")
            else:
                result[name] = value
        return result

    return kept(tree, ""), without_effect


def _accepted(key: str, value: Any, origins: Origins) -> Any:
    known, (section, _, name) = [*EASYR1_KEYS, *INTERNAL_KEYS], key.rpartition(".")
    if key not in known and not (value is None and any(other.startswith(f"{key}.") for other in known)):
        siblings = [other for other in known if other.startswith(f"{section}.")]
        raise origins.error(key, f"unknown key '{key}'.{did_you_mean(key, siblings)}")
    if key in EASYR1_KEYS:
        kind = EASYR1_KEYS[key].kind
        hint = _KINDS[kind.removesuffix("?")]
        declared = type("Key", (), {"__annotations__": {name: hint | None if kind.endswith("?") else hint}})
        value = getattr(origins.read(pydantic_section(declared), {name: value}, path=section), name)
    entry = engine_key_of(key)
    if entry is not None and entry.only is not None and value != entry.only:
        raise origins.error(key, f"{key} must be {written(entry.only)}, got {written(value)}. {entry.remedy}")
    return value


def report_engine_keys(without_effect: Tree, origins: Origins) -> None:
    """Log one notice that lists keys without effect with their places, by the reason they have none."""
    by_reason: dict[str, list[str]] = {}
    for key in without_effect:
        entry = engine_key_of(key)
        assert entry is not None
        by_reason.setdefault(entry.reason, []).append(f"{key} ({origins.place_of(key)})")
    if by_reason:
        lines = [f"\n  {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]
        count = len(without_effect)
        logger.warning("%d EasyR1 key%s without effect here:%s", count, "s" if count > 1 else "", "".join(lines))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The key itself, or the dotted keys below it where EasyR1 has a section of that name."""
    if isinstance(value, Mapping) and key not in EASYR1_KEYS:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value
