"""Reads the adapter of a checkpoint, which others may have trained, as its tensors and a few settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from cepo.errors import CheckpointError
from cepo.foreign_files import read_json, size_of
from cepo.rollout.generator import AdapterWeights
from cepo.trees import is_list

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _DOWN = "base_model.model.", ".lora_A.weight"
_READ = ("r", "lora_alpha", "use_rslora", "use_dora", "modules_to_save", "bias", "lora_bias", "fan_in_fan_out")
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_NEEDLESS = (
    "lora_dropout",
    "base_model_name_or_path",
    "peft_version",
    "revision",
    "task_type",
    "inference_mode",
    "auto_mapping",
)
"""What is for training or for information alone."""
_PLAIN = re.compile(r"(\.\*)?[\w.-]*(\.\*)?")
"""Patterns that are matched in few steps, such as cepo's `.*visual.*`."""


def read_adapter(folder: Path) -> AdapterWeights:
    """Returns the tensors of an adapter with the settings that PEFT needs to add them to a model.

    Layers are chosen by the recorded names, or by those of the tensors if a pattern is recorded, which could take forever
    to match. A setting that PEFT would follow but that is not read here is refused, so that no adapter means something
    else than trained.

    Raises:
        CheckpointError: a file breaks the policy of `cepo.foreign_files`, or the two contradict each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            size_of(folder / name, within=folder.parent)
        recorded = read_json(folder / ADAPTER_CONFIG, dict, within=folder.parent)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        return AdapterWeights(tensors=tensors, adapter_config=_settings(recorded, tensors))
    except (OSError, ValueError, TypeError, SafetensorError) as error:  # DataError is a ValueError
        raise CheckpointError(f"{folder} cannot be read as an adapter: {error}") from error


def _settings(recorded: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    from peft import LoraConfig

    plain = LoraConfig().to_dict()
    others = recorded.keys() - {*_READ, *_LAYERS, *_NEEDLESS}
    foreign = sorted(name for name in others if recorded[name] and recorded[name] != plain.get(name))
    if foreign:
        raise ValueError(f"{ADAPTER_CONFIG} has settings that cepo does not read: {', '.join(foreign)}")
    rank, alpha = recorded.get("r"), recorded.get("lora_alpha", plain["lora_alpha"])
    if not isinstance(rank, int):
        raise ValueError(f"{ADAPTER_CONFIG} names no rank r")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{ADAPTER_CONFIG} has a lora_alpha that is not a number")
    layers = {name.removesuffix(_DOWN): tensor for name, tensor in tensors.items() if name.endswith(_DOWN)}
    if not layers:
        raise ValueError(f"{ADAPTER_WEIGHTS} has no tensor lora_A")
    if other := [name for name, tensor in layers.items() if tensor.ndim != 2 or tensor.shape[0] != rank]:
        raise ValueError(f"{ADAPTER_CONFIG} names the rank {rank}, which is not that of {min(other)}")
    if infinite := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise ValueError(f"{min(infinite)} has values that are not finite")
    kept = {name: recorded[name] for name in _READ if name in recorded} | {"peft_type": "LORA"}
    chosen = {name: recorded[name] for name in _LAYERS if recorded.get(name)}
    if "target_modules" in chosen and chosen.keys() <= {*_LAYERS[:2]} and all(map(_is_plain, chosen.values())):
        return kept | chosen
    trained = {name.partition(".lora_")[0].removeprefix(_PREFIX) for name in tensors if ".lora_" in name}
    return kept | {"target_modules": sorted(trained)}


def _is_plain(names: object) -> bool:
    return is_list(names) or (isinstance(names, str) and _PLAIN.fullmatch(names) is not None)
