"""A LoRA adapter as a folder in PEFT's form, which vLLM, PEFT and merging tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from cepo.rollout.base import AdapterWeights


def write_adapter(weights: AdapterWeights, folder: Path) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(_as_text(weights) + "\n", encoding="utf-8")


def plain_config(weights: AdapterWeights) -> dict[str, Any]:
    """The content of adapter_config.json as a reader of the file gets it."""
    return json.loads(_as_text(weights))


def _as_text(weights: AdapterWeights) -> str:
    return json.dumps(dict(weights.adapter_config), indent=2, default=_as_json)


def _as_json(value: object) -> object:
    """PEFT keeps target modules as a set and its kind as an enumeration member."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
