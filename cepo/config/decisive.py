"""Selects the settings that decide what is trained, which a run and the checkpoint that it continues must share."""

from __future__ import annotations

from typing import Any

from cepo.config.loader import record_tree
from cepo.config.private import digest
from cepo.config.schema import RunConfig, RunSettings
from cepo.sections import is_decisive
from cepo.trees import is_mapping, leaves

_KEYWORDS = "worker.reward.reward_function_kwargs"


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Returns the settings without which a checkpoint does not fit at all: method, model and form of the weights."""
    model, lora = config.worker.actor.model, config.worker.actor.model.lora
    return {
        "adv_estimator": config.algorithm.adv_estimator,
        "model_path": model.model_path,
        "lora_rank": lora.rank,
        "quantization": lora.quantization,
        "double_quantization": None if lora.quantization is None else lora.double_quantization,
    }


def decisive_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the recorded settings that decide what is trained, by dotted key, without empty mappings.

    They are those that the schema marks so. Of the reward function's keywords, which may be confidential, a digest is
    kept.
    """
    tree = leaves(record_tree(config))
    found = {key: value for key, value in tree if is_decisive(RunSettings, key) and not is_mapping(value)}
    keywords = {key: found.pop(key) for key in list(found) if key.startswith(_KEYWORDS)}
    return found | {f"{_KEYWORDS} (digest)": digest(keywords)}
